"""Sampling in the paged engine with a real tiny model: constraints and penalties hold, and sequences resume alike."""

import json
import re
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from model_workers.engine.checkpoint import load_engine
from model_workers.engine.paged_engine import PagedEngine
from model_workers.engine.protocol import (
    Sampling,
    SequenceEnd,
)
from model_workers.messages import final
from sluice.errors import InvalidRequest
from sluice.settings import ModelSettings, resolve_model_path
from tests.support.sequences import drive, sequence_spec

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["order", "ticket"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 20},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
    },
    "required": ["kind", "count", "notes"],
    "additionalProperties": False,
}
END = 5
REGEX = "(?:[0-9]{2}, ){2,3}[a-z]{5,9}"
MIN_TOKENS = 50
ROWS: list[dict[str, Any]] = [
    {"json_schema": json.dumps(SCHEMA)},
    {"regex": REGEX},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.5, "min_p": 0.01},
    {"min_tokens": MIN_TOKENS, "top_k": 40},
]
SCHEMA_ROW, REGEX_ROW, MIN_TOKENS_ROW = 0, 1, 4


def settings(**changes: Any) -> ModelSettings:
    chosen = {"name": "small", "path": "builtin:small", "tier": "small", "slots": 8}
    return ModelSettings.model_validate({**chosen, **changes})


@pytest.fixture(scope="module")
def engine() -> PagedEngine:
    return load_engine(settings())


def sampling(changes: dict[str, Any], seed: int) -> Sampling:
    # Hot, so that only the constraint makes the text what it is.
    whole = {
        "max_tokens": 150,
        "temperature": 1.5,
        "seed": seed,
        "stop_token_ids": frozenset({END}),
    }
    return Sampling(**(whole | changes))


def test_constraints_hold_and_rows_resume_alike(engine: PagedEngine) -> None:
    sequences = {
        f"{i}/{seed}": sampling(ROWS[i], seed) for i in range(len(ROWS)) for seed in (1, 2, 3)
    }
    whole = drive(
        engine, *(sequence_spec(name, [1, 9, 4], chosen) for name, chosen in sequences.items())
    )
    text = Tokenizer.from_file(f"{resolve_model_path('builtin:small')}/tokenizer.json")
    texts = {name: text.decode(tokens) for name, tokens in whole.tokens.items()}
    stopped = {name for name, end in whole.ends.items() if end is SequenceEnd.STOP}
    assert {f"{REGEX_ROW}/{seed}" for seed in (1, 2, 3)} <= stopped, "it ends of itself"
    assert any(name.startswith(f"{SCHEMA_ROW}/") for name in stopped)
    for name in stopped:
        if name.startswith(f"{SCHEMA_ROW}/"):
            jsonschema.validate(json.loads(texts[name]), SCHEMA)
        elif name.startswith(f"{REGEX_ROW}/"):
            assert re.fullmatch(REGEX, texts[name])
    for name, tokens in whole.tokens.items():
        if name.startswith(f"{MIN_TOKENS_ROW}/"):
            assert len(tokens) >= MIN_TOKENS
    specs = [
        sequence_spec(name, [1, 9, 4], chosen, produced=whole.tokens[name][: 5 + i])
        for i, (name, chosen) in enumerate(sequences.items())
    ]
    resumed = drive(engine, *specs)
    for i, (name, tokens) in enumerate(whole.tokens.items()):
        assert tokens[: 5 + i] + resumed.tokens.get(name, []) == tokens
        assert resumed.ends[name] is whole.ends[name]


def test_penalties_make_tokens_repeat_less(engine: PagedEngine) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "none": {},
        "presence and frequency": {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        "repetition": {"repetition_penalty": 2.0},
    }
    sequences = [
        sequence_spec(f"{kind}/{seed}", [1, 9, 4], sampling({**changes, "min_tokens": 100}, seed))
        for kind, changes in kinds.items()
        for seed in (1, 2)
    ]
    tokens = drive(engine, *sequences).tokens
    distinct = {
        kind: sum(len(set(tokens[f"{kind}/{seed}"][:100])) for seed in (1, 2)) for kind in kinds
    }
    assert distinct["presence and frequency"] > distinct["none"]
    assert distinct["repetition"] > distinct["none"]


def test_a_constraint_out_of_bounds_ends_its_row_alone(engine: PagedEngine) -> None:
    sequences = {
        "bad": sampling({"regex": "(a{1000}){1000}"}, 1),
        "good": sampling({"regex": REGEX}, 1),
    }
    for name, chosen in sequences.items():
        engine.add(sequence_spec(name, [1, 9, 4], chosen), 0.0)
    ends = {}
    while engine.has_sequences():
        ends |= {one.request_id: one for one in engine.step(0.0) if one.end is not None}
    assert ends["good"].end is SequenceEnd.STOP
    assert (ends["bad"].end, ends["bad"].reason) == (SequenceEnd.FAILED, "REQUEST_INVALID")
    assert ends["bad"].field == "sampling.regex"
    assert final(ends["bad"]).error.field == "sampling.regex"


def test_a_constraint_that_cannot_be_held_refuses_its_row(engine: PagedEngine) -> None:
    with pytest.raises(InvalidRequest, match="unclosed group"):
        engine.add(sequence_spec("wrong", [1, 2], sampling({"regex": "("}, 0)), 0.0)
    assert not engine.has_sequences()
