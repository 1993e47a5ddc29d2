"""Validate the tools that a request offers, and how its answer may call them."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.models.tools import FunctionTool, ToolUse
from gateway.validation.conversation import DEPTH_MAX, VALUES_MAX, FieldViolations, fits_depth
from sluice.constraints import JSON_SCHEMA_MAX_BYTES
from sluice.openai.fields import BadJson, load_json, values_in
from sluice.v1 import inference_pb2 as pb
from sluice.wire.subjects import is_token

TOOLS_MAX: Final = 128
"""Most tools of a request."""
TOOLS_BYTES_MAX: Final = 256 << 10
"""Most characters of descriptions and parameters of all tools together."""


def tools_of(tools: Sequence[pb.Tool], violations: FieldViolations) -> tuple[FunctionTool, ...]:
    """Return the tools; add what is wrong with them to `violations`."""
    sizes = (len(tool.description) + len(tool.parameters) for tool in tools)
    if len(tools) > TOOLS_MAX or sum(sizes) > TOOLS_BYTES_MAX:
        violations.add(
            "tools", f"must be at most {TOOLS_MAX} tools with {TOOLS_BYTES_MAX} characters"
        )
        return ()
    values = [values_in(tool.parameters) for tool in tools]
    if sum(values) > VALUES_MAX:
        field = f"tools[{values.index(max(values))}].parameters"
        violations.add(field, f"all parameters together must have at most {VALUES_MAX} values")
        return ()
    names = [tool.name for tool in tools]
    violations.check(len(set(names)) == len(names), "tools", "have the same name twice")
    return tuple(_tool(tool, f"tools[{i}]", violations) for i, tool in enumerate(tools))


def tool_use_of(request: pb.GenerateRequest, violations: FieldViolations) -> ToolUse | None:
    """Return which tools the answer may call, or None without tools; add what is wrong to `violations`."""
    choice = request.tool_choice
    if not request.tools:
        wants = choice.function or choice.mode == pb.TOOL_CHOICE_MODE_REQUIRED
        violations.check(not wants, "tool_choice", "needs tools")
        violations.check(
            not request.HasField("parallel_tool_calls"), "parallel_tool_calls", "needs tools"
        )
        return None
    tools = tools_of(request.tools, violations)
    violations.check(
        choice.mode in pb.ToolChoiceMode.values(),
        "tool_choice.mode",
        "must be auto, none or required",
    )
    violations.check(
        choice.function in ("", *(tool.name for tool in tools)),
        "tool_choice.function",
        "must be the name of one of the tools",
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
    _check_together(request, use, violations)
    return use


def _check_together(request: pb.GenerateRequest, use: ToolUse, violations: FieldViolations) -> None:
    sampling = request.sampling
    raw = request.raw_prompt or request.WhichOneof("input") == "tokens"
    violations.check(not raw, "tools", "need the chat template, and no raw prompt")
    constraint = sampling.WhichOneof("constraint")
    violations.check(constraint != "regex", "sampling.regex", "cannot be combined with tools")
    for name in ("min_tokens", "stop_token_ids"):
        violations.check(
            not (use.constrained and getattr(sampling, name)),
            f"sampling.{name}",
            "cannot be combined with strict tools or a required call, which determine where the answer ends",
        )


def _tool(tool: pb.Tool, path: str, violations: FieldViolations) -> FunctionTool:
    violations.check(
        is_token(tool.name), f"{path}.name", "must be 1 to 64 letters, digits, '_' and '-'"
    )
    field, parameters = f"{path}.parameters", {}
    if len(tool.parameters.encode()) > JSON_SCHEMA_MAX_BYTES:
        violations.add(field, f"must have at most {JSON_SCHEMA_MAX_BYTES} bytes")
    elif tool.parameters:
        parameters = _object(tool.parameters, field, violations)
        violations.check(
            parameters.get("type", "object") == "object",
            field,
            'must be a schema of "type": "object"',
        )
    return FunctionTool(tool.name, tool.description, parameters, tool.strict)


def _object(text: str, field: str, violations: FieldViolations) -> dict[str, Any]:
    """Return the JSON object in `text`; add a violation and return an empty one if it is not an object."""
    try:
        value = load_json(text)
    except BadJson:
        value = None
    if not isinstance(value, dict):
        violations.add(field, "must be a JSON object")
        return {}
    if not fits_depth(value, DEPTH_MAX):
        violations.add(field, f"must be at most {DEPTH_MAX} levels deep")
        return {}
    return value


def function_of(tool: FunctionTool, *, says_strict: bool = False) -> Mapping[str, Any]:
    """Return a tool as chat templates take it; `says_strict` adds `strict`, for a remote server."""
    parameters = tool.parameters or {"type": "object", "properties": {}}
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": parameters,
    }
    if says_strict and tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}
