"""Validate tools, and sampling parameters that change the prompt or that only servers of OpenAI's API take."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.models.tools import FunctionTool, ToolUse
from gateway.validation.conversation import DEPTH_MAX, VALUES_MAX, FieldViolations, fits_depth
from sluice.constraints import JSON_SCHEMA_MAX_BYTES
from sluice.errors import InvalidRequest
from sluice.openai.fields import BadField, BadJson, load_json, values_in
from sluice.openai.requests import schema_of
from sluice.settings.remote import ServerSettings
from sluice.v1 import inference_pb2 as pb
from sluice.wire.subjects import is_token

VARIABLES_MAX: Final = 32
"""Most variables of a chat template that a request may set."""
SHAPE_MAX_BYTES: Final = JSON_SCHEMA_MAX_BYTES + 8192
"""Most characters of the JSON of one option: a response_format has a schema, its name and its description."""
_RESERVED: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"}
)
"""Variables that the gateway or a remote server sets itself."""
NO_EFFORT: Final = "none"
"""A reasoning_effort that every model supports: it sets `_NO_THINKING` in the template."""
_NO_THINKING: Final[Mapping[str, Any]] = {"enable_thinking": False}
SERVED_HERE: Final = frozenset({"stop", "max_tokens", "n", "response_format"})
"""Sampling parameters that the gateway itself applies."""
NEUTRAL: Final[Mapping[str, float]] = {"top_p": 1.0, "repetition_penalty": 1.0}
"""Values of parameters that change nothing, where that is not 0."""
ASKING: Final = frozenset({"seed", "logprobs"})
"""Parameters that change something whatever their value."""
_WORD: Final = "a word of up to 64 letters, digits, '-' and '_'"

TOOLS_MAX: Final = 128
"""Most tools of a request."""
TOOLS_CHARS_MAX: Final = 256 << 10
"""Most characters of descriptions and parameters of all tools together."""


def check_options(request: pb.GenerateRequest, violations: FieldViolations) -> dict[str, Any]:
    """Check the options of `request`, and return the variables for the chat template.

    Variables become a part of the prompt without inspection, so only booleans, numbers and single words are allowed.
    """
    sampling, effort, check = request.sampling, request.sampling.reasoning_effort, violations.check
    check(not effort or is_token(effort), "sampling.reasoning_effort", f"must be {_WORD}")
    if sampling.response_format:
        is_same = _asks_for(sampling.response_format, _object(sampling.json_schema))
        check(is_same, "sampling.response_format", "must ask for the same as json_schema")
    variables = dict(_NO_THINKING) if effort == NO_EFFORT else {}
    if not sampling.chat_template_kwargs:
        return variables
    field, sent = "sampling.chat_template_kwargs", _object(sampling.chat_template_kwargs)
    check(not request.raw_prompt, field, "needs the chat template, and no raw prompt")
    if sent is None or len(sent) > VARIABLES_MAX:
        violations.add(field, f"must be a JSON object with at most {VARIABLES_MAX} entries")
        return variables
    for name, value in sent.items():
        is_name = is_token(name) and name.isidentifier()
        if not is_name or name in _RESERVED or name.endswith("_token"):
            violations.add(field, "has an invalid or reserved name of a variable")
        elif not _is_plain(value):
            violations.add(f"{field}.{name}", f"must be true, false, null, a number, or {_WORD}")
    return {**variables, **sent}


def _is_plain(value: Any) -> bool:
    """Return whether `value` cannot carry text into a prompt."""
    if isinstance(value, str):
        return is_token(value)
    return value is None or isinstance(value, bool | int | float)


def _asks_for(shape: str, schema: dict[str, Any] | None) -> bool:
    """Return whether a response_format has the `schema` that constrains the answer."""
    try:
        parsed = _object(shape)
        return parsed is not None and schema_of(parsed) == schema
    except BadField:
        return False


def _object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in `text`; None if it is not an object, or too long."""
    try:
        value = load_json(text) if len(text) <= SHAPE_MAX_BYTES else None
    except BadJson:
        return None
    return value if isinstance(value, dict) else None


def check_server(
    sampling: pb.SamplingParams, tools: ToolUse | None, name: str, server: ServerSettings
) -> None:
    """Raise InvalidRequest if the server of a model of `engine: openai` does not take all parameters."""
    served = SERVED_HERE if server.api == "chat" else SERVED_HERE | {"chat_template_kwargs"}
    for field, value in sampling.ListFields():
        is_requested = field.name in ASKING or value != NEUTRAL.get(field.name, 0)
        if is_requested and field.name not in served and field.name not in server.names:
            raise _not_taken(f"sampling.{field.name}", name, "leave it out")
    if tools is None:
        return
    chats, names = server.api == "chat", server.names
    if tools.forced and ("tool_choice" if chats else "grammar") not in names:
        raise _not_taken("tool_choice", name, "let the model choose")
    strict = next((at for at, tool in enumerate(tools.tools) if tool.strict), None)
    if strict is not None and ("strict" if chats else "grammar") not in names:
        raise _not_taken(f"tools[{strict}].strict", name, "leave it out")
    if not chats and tools.schema and "grammar" not in names:
        raise _not_taken("sampling.json_schema", name, "leave it or the tools out")


def _not_taken(field: str, name: str, remedy: str) -> InvalidRequest:
    return InvalidRequest.of(field, f"the server of {name} does not take it; {remedy}")


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
    """Return which tools the answer may call, or None if it may call none; add what is wrong to `violations`."""
    choice, check, sampling = request.tool_choice, violations.check, request.sampling
    is_required = choice.mode == pb.TOOL_CHOICE_MODE_REQUIRED
    has_parallel = request.HasField("parallel_tool_calls")
    if not request.tools:
        check(not (choice.function or is_required), "tool_choice", "needs tools")
        check(not has_parallel, "parallel_tool_calls", "needs tools")
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
        parallel=request.parallel_tool_calls or not has_parallel,
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
    problem = "must be 1 to 64 letters, digits, '_' and '-'"
    violations.check(is_token(tool.name), f"{path}.name", problem)
    field, parameters, size = f"{path}.parameters", {}, len(tool.parameters.encode())
    if violations.check_count(field, size, JSON_SCHEMA_MAX_BYTES, "bytes") and size:
        parsed = _object(tool.parameters)
        violations.check(parsed is not None, field, "must be a JSON object")
        parameters = parsed or {}
        is_shallow = fits_depth(parameters, DEPTH_MAX)
        violations.check(is_shallow, field, f"must be at most {DEPTH_MAX} levels deep")
        is_object = parameters.get("type", "object") == "object"
        violations.check(is_object, field, 'must be a schema of "type": "object"')
    return FunctionTool(tool.name, tool.description, parameters, tool.strict)


def function_of(tool: FunctionTool, *, with_strict: bool = False) -> Mapping[str, Any]:
    """Return a tool as chat templates take it; `with_strict` adds `strict`, for a remote server."""
    parameters = tool.parameters or {"type": "object", "properties": {}}
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": parameters,
    }
    if with_strict and tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}
