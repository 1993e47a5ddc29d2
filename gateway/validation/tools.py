"""The tools of a request, and the calls in its conversation."""

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from gateway.tools.tool import Tool, ToolCall, ToolUse
from gateway.validation.fields import FieldViolations
from sluice.constraints import JSON_SCHEMA_MAX_BYTES
from sluice.openai.fields import values_in
from sluice.v1 import inference_pb2 as pb

TOOLS_MAX: Final = 128
TOOLS_BYTES_MAX: Final = 256 << 10
VALUES_MAX: Final = 16_384
"""Values in the JSON of all tools, or of all calls, of a request: each string is inspected like a message."""
DEPTH_MAX: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CALL_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


def tools_of(tools: Sequence[pb.Tool], found: FieldViolations) -> tuple[Tool, ...]:
    """The tools; what is wrong with them goes into ``found``."""
    size = sum(len(tool.description) + len(tool.parameters) for tool in tools)
    if len(tools) > TOOLS_MAX or size > TOOLS_BYTES_MAX:
        found.add("tools", f"must be at most {TOOLS_MAX} tools with {TOOLS_BYTES_MAX} characters")
        return ()
    values = [values_in(tool.parameters) for tool in tools]
    if sum(values) > VALUES_MAX:
        field = f"tools[{values.index(max(values))}].parameters"
        found.add(field, f"all parameters together must have at most {VALUES_MAX} values")
        return ()
    names = [tool.name for tool in tools]
    found.check(len(set(names)) == len(names), "tools", "have the same name twice")
    return tuple(_tool(tool, f"tools[{i}]", found) for i, tool in enumerate(tools))


def tool_use_of(request: pb.GenerateRequest, found: FieldViolations) -> ToolUse | None:
    """What the answer may call; None without tools."""
    choice = request.tool_choice
    if not request.tools:
        wants = choice.function or choice.mode == pb.TOOL_CHOICE_MODE_REQUIRED
        found.check(not wants, "tool_choice", "needs tools")
        found.check(
            not request.HasField("parallel_tool_calls"), "parallel_tool_calls", "needs tools"
        )
        return None
    tools = tools_of(request.tools, found)
    found.check(
        choice.mode in pb.ToolChoiceMode.values(), "tool_choice.mode", "is none of the known ones"
    )
    found.check(
        choice.function in ("", *(tool.name for tool in tools)),
        "tool_choice.function",
        "is the name of none of the tools",
    )
    if choice.mode == pb.TOOL_CHOICE_MODE_NONE:
        return None
    use = ToolUse(
        tools,
        only=choice.function,
        required=choice.mode == pb.TOOL_CHOICE_MODE_REQUIRED,
        parallel=request.parallel_tool_calls or not request.HasField("parallel_tool_calls"),
        schema=request.sampling.json_schema,
    )
    _check_together(request, use, found)
    return use


def has_room_for_calls(messages: Sequence[pb.ChatMessage]) -> bool:
    """Whether all calls in ``messages`` together have few enough values to be read."""
    calls = (call for message in messages for call in message.tool_calls)
    return sum(values_in(call.arguments) for call in calls) <= VALUES_MAX


def calls_of(message: pb.ChatMessage, at: str, found: FieldViolations) -> tuple[ToolCall, ...]:
    """The calls that an assistant's turn made."""
    return tuple(
        _call(call, f"{at}.tool_calls[{i}]", found) for i, call in enumerate(message.tool_calls)
    )


def _check_together(request: pb.GenerateRequest, use: ToolUse, found: FieldViolations) -> None:
    sampling = request.sampling
    found.check(not request.raw_prompt, "tools", "need the chat template, and no raw prompt")
    constraint = sampling.WhichOneof("constraint")
    found.check(constraint != "regex", "sampling.regex", "cannot be combined with tools")
    for field in ("min_tokens", "stop_token_ids"):
        found.check(
            not (use.constrained and getattr(sampling, field)),
            f"sampling.{field}",
            "cannot be combined with strict tools or a demanded call, which determine where the answer ends",
        )


def _tool(tool: pb.Tool, at: str, found: FieldViolations) -> Tool:
    found.check(
        _NAME.fullmatch(tool.name) is not None,
        f"{at}.name",
        "must be 1 to 64 letters, digits, '_' and '-'",
    )
    field, parameters = f"{at}.parameters", {}
    if len(tool.parameters.encode()) > JSON_SCHEMA_MAX_BYTES:
        found.add(field, f"must have at most {JSON_SCHEMA_MAX_BYTES} bytes")
    elif tool.parameters:
        parameters = _object(tool.parameters, field, found)
        found.check(
            parameters.get("type", "object") == "object",
            field,
            'must be a schema of "type": "object"',
        )
    return Tool(tool.name, tool.description, parameters, tool.strict)


def _call(call: pb.ToolCall, at: str, found: FieldViolations) -> ToolCall:
    found.check(
        _CALL_ID.fullmatch(call.id) is not None,
        f"{at}.id",
        "must be 1 to 64 letters, digits, '_', '-', '.' and ':'",
    )
    found.check(_NAME.fullmatch(call.name) is not None, f"{at}.name", "must be the name of a tool")
    return ToolCall(call.id, call.name, _object(call.arguments or "{}", f"{at}.arguments", found))


def _object(text: str, field: str, found: FieldViolations) -> dict[str, Any]:
    """The JSON object in ``text``; empty when it is none."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # halves of surrogate pairs have no UTF-8
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        found.add(field, "must be a JSON object")
        return {}
    if _depth(value) > DEPTH_MAX:
        found.add(field, f"must be at most {DEPTH_MAX} levels deep")
        return {}
    return value


def _depth(value: Any) -> int:
    """How deep ``value`` is; of what is too deep only that it is."""
    level, depth = [value], 0
    while level and depth <= DEPTH_MAX:
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        depth += 1
    return depth
