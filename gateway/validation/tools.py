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
TOOLS_CHARS_MAX: Final = 256 << 10
"""Most characters of descriptions and parameters of all tools together."""


def tools_of(tools: Sequence[pb.Tool], violations: FieldViolations) -> tuple[FunctionTool, ...]:
    """Return the tools; add what is wrong with them to `violations`."""
    sizes = sum(len(tool.description) + len(tool.parameters) for tool in tools)
    check_count = violations.check_count
    if not (
        check_count("tools", len(tools), TOOLS_MAX, "entries")
        and check_count("tools", sizes, TOOLS_CHARS_MAX, "characters in all")
    ):
        return ()
    values = [values_in(tool.parameters) for tool in tools]
    largest = f"tools[{values.index(max(values))}].parameters" if values else "tools"
    if not check_count(largest, sum(values), VALUES_MAX, "values in all tools"):
        return ()
    names = {tool.name for tool in tools}
    violations.check(len(names) == len(tools), "tools", "have the same name twice")
    return tuple(_tool(tool, f"tools[{i}]", violations) for i, tool in enumerate(tools))


def tool_use_of(request: pb.GenerateRequest, violations: FieldViolations) -> ToolUse | None:
    """Return which tools the answer may call, or None without tools; add what is wrong to `violations`."""
    choice, check, sampling = request.tool_choice, violations.check, request.sampling
    is_required = choice.mode == pb.TOOL_CHOICE_MODE_REQUIRED
    says_parallel = request.HasField("parallel_tool_calls")
    if not request.tools:
        check(not (choice.function or is_required), "tool_choice", "needs tools")
        check(not says_parallel, "parallel_tool_calls", "needs tools")
        return None
    tools = tools_of(request.tools, violations)
    is_mode = choice.mode in pb.ToolChoiceMode.values()
    check(is_mode, "tool_choice.mode", "must be auto, none or required")
    is_named = choice.function in ("", *(tool.name for tool in tools))
    check(is_named, "tool_choice.function", "must be the name of one of the tools")
    if choice.mode == pb.TOOL_CHOICE_MODE_NONE:
        return None
    use = ToolUse(
        tools,
        only=choice.function,
        required=is_required,
        parallel=request.parallel_tool_calls or not says_parallel,
        schema=sampling.json_schema,
    )
    is_raw = request.raw_prompt or request.WhichOneof("input") == "tokens"
    check(not is_raw, "tools", "need the chat template, and no raw prompt")
    constraint = sampling.WhichOneof("constraint")
    check(constraint != "regex", "sampling.regex", "cannot be combined with tools")
    conflict = "cannot be combined with strict tools or a required call, which determine where the answer ends"
    for name in ("min_tokens", "stop_token_ids"):
        check(not (use.constrained and getattr(sampling, name)), f"sampling.{name}", conflict)
    return use


def _tool(tool: pb.Tool, path: str, violations: FieldViolations) -> FunctionTool:
    wanted = "must be 1 to 64 letters, digits, '_' and '-'"
    violations.check(is_token(tool.name), f"{path}.name", wanted)
    field, parameters, size = f"{path}.parameters", {}, len(tool.parameters.encode())
    if violations.check_count(field, size, JSON_SCHEMA_MAX_BYTES, "bytes") and size:
        parameters = _object(tool.parameters, field, violations)
        is_object = parameters.get("type", "object") == "object"
        violations.check(is_object, field, 'must be a schema of "type": "object"')
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
