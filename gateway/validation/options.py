"""Validates sampling parameters that shape the prompt, or that only a server of OpenAI's API takes."""

from collections.abc import Mapping
from typing import Any, Final

from gateway.validation.conversation import FieldViolations
from sluice.constraints import JSON_SCHEMA_MAX_BYTES
from sluice.openai.fields import BadField, BadJson, load_json
from sluice.openai.requests import schema_of
from sluice.v1 import inference_pb2 as pb
from sluice.wire.subjects import is_token

VARIABLES_MAX: Final = 32
"""Variables of a chat template that a request may set."""
SHAPE_MAX_BYTES: Final = JSON_SCHEMA_MAX_BYTES + 8192
"""Limit for a response_format: a schema, its name and its description."""
_OF_RENDERING: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"}
)
"""Variables that a gateway or a server sets itself."""
NO_EFFORT: Final = "none"
"""A reasoning_effort that every model takes: templates of models that reason say so in `_THINKS_NOT`."""
_THINKS_NOT: Final[Mapping[str, Any]] = {"enable_thinking": False}
_WORD: Final = "a word of up to 64 letters, digits, '-' and '_'"


def check_options(request: pb.GenerateRequest, found: FieldViolations) -> Mapping[str, Any]:
    """Check the fields, and return the variables for the chat template.

    Variables become a part of the prompt without inspection, so only switches, numbers and single words are taken.
    """
    sampling = request.sampling
    effort = sampling.reasoning_effort
    found.check(not effort or is_token(effort), "sampling.reasoning_effort", f"must be {_WORD}")
    if sampling.response_format:
        _check_shape(sampling, found)
    variables = _THINKS_NOT if effort == NO_EFFORT else {}
    if not sampling.chat_template_kwargs:
        return variables
    field = "sampling.chat_template_kwargs"
    found.check(not request.raw_prompt, field, "needs the chat template, and no raw prompt")
    return {**variables, **_variables(sampling.chat_template_kwargs, field, found)}


def _variables(text: str, field: str, found: FieldViolations) -> Mapping[str, Any]:
    variables = _object(text)
    if variables is None or len(variables) > VARIABLES_MAX:
        found.add(field, f"must be a JSON object with at most {VARIABLES_MAX} entries")
        return {}
    for name, value in variables.items():
        known = is_token(name) and name.isidentifier()
        if not known or name in _OF_RENDERING or name.endswith("_token"):
            found.add(field, "has a name that is no variable of a chat template, or a reserved one")
        elif not _is_plain(value):
            found.add(f"{field}.{name}", f"must be true, false, null, a number, or {_WORD}")
    return variables


def _is_plain(value: Any) -> bool:
    """Whether ``value`` cannot carry text into a prompt."""
    if isinstance(value, str):
        return is_token(value)
    return value is None or isinstance(value, bool | int | float)


def _check_shape(sampling: pb.SamplingParams, found: FieldViolations) -> None:
    """Check that the response_format says what the schema says, by which the answer is inspected and kept."""
    try:
        shape, schema = _object(sampling.response_format), _object(sampling.json_schema)
        agrees = shape is not None and schema_of(shape) == schema
    except BadField:
        agrees = False
    found.check(agrees, "sampling.response_format", "must ask for the same as json_schema")


def _object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in ``text``; None where it is none, or too long."""
    try:
        value = load_json(text) if len(text) <= SHAPE_MAX_BYTES else None
    except BadJson:
        return None
    return value if isinstance(value, dict) else None
