"""Word what is wrong in a configuration: every problem, by key and line, with what to do about it."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

Place = tuple[str | int, ...]
"""Keys and positions from the top of the configuration down to a value."""
Lines = Mapping[Place, int]
"""Where a file has each value, line numbers from 1."""
ENV_PREFIX: Final = "SLUICE_"
ENV_DELIMITER: Final = "__"
_SHOWN_CHARS: Final = 60
_KEYS_SHOWN: Final = 20

_REMOVED: Final[Mapping[str, str]] = {
    "batcher.prefetch_rows": "is batcher.room_rows now, which counts rows of one gateway, model and class",
    "batcher.prefetch_bytes": "is batcher.room_bytes now",
    "nats.tasks_max_messages": "is gone: bulk calls wait in their gateway (batcher.room_rows); leave it out",
    "nats.tasks_max_bytes": "is gone: bulk calls wait in their gateway (batcher.room_bytes); leave it out",
    "nats.tasks_max_age_s": "is gone: bulk calls wait in their gateway until their deadline; leave it out",
    "drift.judge_every": "is gone: drift is computed when it is asked for; leave it out",
    "cascade.min_margin": "is gone: `min_logprob` says how sure the first answer must be; leave it out",
    "gateway.queue_max": "is gone: admitted calls wait in their gateway until their deadline; leave it out",
    "cascade.start": "is gone: the second model starts when the first answer is in doubt; leave it out",
    "telemetry.trace_slow_s": "is gone: a collector keeps what is slow (compose/collector.yaml); leave it out",
    "kv_cache_dtype": "is gone: the KV cache is in the model's `dtype`; for more rows raise `cache_gb`",
    "prefill_s_max": "is gone: the engine bounds bulk prompts beside more urgent ones itself; leave it out",
    "by_class": "is gone: what `false` did is `order: arrival`",
    "by_deadline": "is gone: what `false` did is `order: class`, which also leaves out shares of tenants",
    "by_tenant": "is gone: what `false` did is `order: class`, which also leaves out deadlines",
    "batches_in_flight_max": "is gone: it is always 4; leave it out",
    "max_word_chars": "is gone: text without a space is no finding any more; leave it out",
    "aging_rows": "is gone: an overdue class sends one row; for more, shorten its `aging_s`",
}
"""What replaces settings of the release before this one, by the end of the key."""

_WORDS: Final[Mapping[str, str]] = {
    "missing": "is missing",
    "int_parsing": "{input} is not a whole number",
    "int_type": "{input} is not a whole number",
    "int_from_float": "{input} is not a whole number",
    "float_parsing": "{input} is not a number",
    "float_type": "{input} is not a number",
    "finite_number": "{input} is not a finite number",
    "bool_parsing": "{input} is neither true nor false",
    "bool_type": "{input} is neither true nor false",
    "string_type": "{input} is not a text; put it in quotes",
    "path_type": "{input} is not a path",
    "literal_error": "{input} is not one of {expected}",
    "enum": "{input} is not one of {expected}",
    "greater_than": "{input} is too small; use more than {gt}",
    "greater_than_equal": "{input} is too small; use at least {ge}",
    "less_than": "{input} is too large; use less than {lt}",
    "less_than_equal": "{input} is too large; use at most {le}",
    "string_pattern_mismatch": "{input} does not match {pattern}",
    "string_too_short": "{input} is too short; use at least {min_length} characters",
    "string_too_long": "{input} is too long; use at most {max_length} characters",
    "too_short": "has too few entries; name at least {min_length}",
    "too_long": "has too many entries; name at most {max_length}",
    "model_type": "{input} is not a section; write keys below it",
    "model_attributes_type": "{input} is not a section; write keys below it",
    "dict_type": "{input} is not a section; write keys below it",
    "tuple_type": "{input} is not a list; write [...] or lines that begin with a dash",
    "list_type": "{input} is not a list; write [...] or lines that begin with a dash",
}
"""By the type of pydantic's error; of others pydantic's own words are used."""


def problems(
    error: ValidationError, model: type[BaseModel], *above: str, lines: Lines | None = None
) -> list[str]:
    """Describe each problem in one line: where it is, what is wrong, what to do.

    Args:
        model: what was validated.
        above: keys above it.
        lines: where the file has its values.
    """
    found: dict[str, int] = {}
    for problem in error.errors():
        place = _place(problem["loc"], above)
        key = f"{'.'.join(map(str, place))}: " if place else ""
        variable, line = _variable(place), _line(place, lines or {})
        where = f"{variable}: " if variable else f"line {line}: " if line else ""
        found.setdefault(f"{where}{key}{_text(problem, model)}", line)
    return sorted(found, key=found.__getitem__)


def joined(found: Sequence[str], where: str) -> str:
    """Return one message about ``where``: one line for one problem, else a line for each."""
    if len(found) == 1:
        return f"{where}: {found[0]}"
    return "\n".join([f"{where}: {len(found)} problems", *(f"  {one}" for one in found)])


def _place(location: Sequence[str | int], above: Sequence[str]) -> Place:
    # pydantic's "[key]" stands for a key of a mapping that is wrong itself.
    return (*above, *(part for part in location if part != "[key]"))


def _variable(place: Place) -> str:
    """Return the environment variable that the value came from; empty without one."""
    names = {
        (ENV_PREFIX + ENV_DELIMITER.join(map(str, place[:end]))).upper()
        for end in range(1, len(place) + 1)
    }
    return next((one for one in os.environ if one.upper() in names), "")


def _line(place: Place, lines: Lines) -> int:
    """Return the line of the value, or of the nearest section that the file has; 0 without one."""
    return next((lines[place[:end]] for end in range(len(place), 0, -1) if place[:end] in lines), 0)


def _text(problem: Any, model: type[BaseModel]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    models, field = _found(model, problem["loc"])
    if problem["type"] == "extra_forbidden":
        gone = (text for end, text in _REMOVED.items() if f".{key}".endswith(f".{end}"))
        return next(gone, None) or _unknown(str(problem["loc"][-1]), models)
    words = _WORDS.get(problem["type"])
    if words is None:
        return str(problem["msg"]).removeprefix("Value error, ")
    hidden = field is not None and not field.repr
    return words.format(input="this" if hidden else shown(problem["input"]), **_limits(problem))


def _limits(problem: Any) -> dict[str, Any]:
    limits = dict(problem.get("ctx", {}))
    if "expected" in limits:
        limits["expected"] = str(limits["expected"]).replace("'", "").replace(" or ", ", ")
    return {
        name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in limits.items()
    }


def shown(value: Any) -> str:
    """Return a value as a file has it, without passwords in addresses."""
    text = repr(value) if isinstance(value, str) else str(value)
    if isinstance(value, bool):
        text = text.lower()
    text = re.sub(r"//[^/@]*@", "//...@", text)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def _unknown(name: str, models: Sequence[type[BaseModel]]) -> str:
    """Say which key may be meant instead of one that is none."""
    known = list(dict.fromkeys(field for one in models for field in one.model_fields))
    if close := get_close_matches(name, known, n=2):
        return f"no such key; did you mean {' or '.join(close)}?"
    if not known:
        return "no such key"
    more = ", ..." if len(known) > _KEYS_SHOWN else ""
    return f"no such key; there are {', '.join(known[:_KEYS_SHOWN])}{more}"


def _found(
    model: type[BaseModel], location: Sequence[str | int]
) -> tuple[list[type[BaseModel]], FieldInfo | None]:
    """Return the sections that the last key of ``location`` is in, and its field where it is one."""
    models, field, inside = [model], None, [model]
    for part in location:
        declared = [one.model_fields[str(part)] for one in inside if part in one.model_fields]
        models = inside
        field = declared[0] if declared else None
        if declared:
            inside = [found for one in declared for found in _models_in(one.annotation)]
        # Else it is a position in a list, a name in a mapping, or one of several forms: the sections stay.
    return models, field


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
