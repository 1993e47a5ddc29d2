"""Validate sampling parameters that change the prompt, or that only remote servers of OpenAI's API take."""

from collections.abc import Mapping
from typing import Any, Final

from gateway.models.tools import ToolUse
from gateway.validation.conversation import FieldViolations
from sluice.constraints import JSON_SCHEMA_MAX_BYTES
from sluice.errors import InvalidRequest
from sluice.openai.fields import BadField, BadJson, load_json
from sluice.openai.requests import schema_of
from sluice.settings.remote import ServerSettings
from sluice.v1 import inference_pb2 as pb
from sluice.wire.subjects import is_token

VARIABLES_MAX: Final = 32
"""Most variables of a chat template that a request may set."""
SHAPE_MAX_BYTES: Final = JSON_SCHEMA_MAX_BYTES + 8192
"""Most bytes of a response_format: a schema, its name and its description."""
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
        asks = field.name in ASKING or value != NEUTRAL.get(field.name, 0)
        if asks and field.name not in served and field.name not in server.names:
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
