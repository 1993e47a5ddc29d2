"""Validate sampling parameters that change the prompt, or that only remote servers of OpenAI's API take."""

from collections.abc import Mapping
from typing import Any, Final

from gateway.validation.conversation import FieldViolations
from sluice.constraints import JSON_SCHEMA_MAX_BYTES
from sluice.openai.fields import BadField, BadJson, load_json
from sluice.openai.requests import schema_of
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
_WORD: Final = "a word of up to 64 letters, digits, '-' and '_'"


def check_options(request: pb.GenerateRequest, violations: FieldViolations) -> Mapping[str, Any]:
    """Check the options of `request`, and return the variables for the chat template.

    Variables become a part of the prompt without inspection, so only booleans, numbers and single words are allowed.
    """
    sampling = request.sampling
    effort = sampling.reasoning_effort
    violations.check(
        not effort or is_token(effort), "sampling.reasoning_effort", f"must be {_WORD}"
    )
    if sampling.response_format:
        _check_shape(sampling, violations)
    variables = _NO_THINKING if effort == NO_EFFORT else {}
    if not sampling.chat_template_kwargs:
        return variables
    field = "sampling.chat_template_kwargs"
    violations.check(not request.raw_prompt, field, "needs the chat template, and no raw prompt")
    return {**variables, **_variables(sampling.chat_template_kwargs, field, violations)}


def _variables(text: str, field: str, violations: FieldViolations) -> Mapping[str, Any]:
    variables = _object(text)
    if variables is None or len(variables) > VARIABLES_MAX:
        violations.add(field, f"must be a JSON object with at most {VARIABLES_MAX} entries")
        return {}
    for name, value in variables.items():
        is_name = is_token(name) and name.isidentifier()
        if not is_name or name in _RESERVED or name.endswith("_token"):
            violations.add(field, "has an invalid or reserved name of a variable")
        elif not _is_plain(value):
            violations.add(f"{field}.{name}", f"must be true, false, null, a number, or {_WORD}")
    return variables


def _is_plain(value: Any) -> bool:
    """Return whether `value` cannot carry text into a prompt."""
    if isinstance(value, str):
        return is_token(value)
    return value is None or isinstance(value, bool | int | float)


def _check_shape(sampling: pb.SamplingParams, violations: FieldViolations) -> None:
    """Check that response_format has the same schema as json_schema, which constrains the answer."""
    try:
        shape, schema = _object(sampling.response_format), _object(sampling.json_schema)
        agrees = shape is not None and schema_of(shape) == schema
    except BadField:
        agrees = False
    violations.check(agrees, "sampling.response_format", "must ask for the same as json_schema")


def _object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in `text`; None if it is not an object, or too long."""
    try:
        value = load_json(text) if len(text) <= SHAPE_MAX_BYTES else None
    except BadJson:
        return None
    return value if isinstance(value, dict) else None
