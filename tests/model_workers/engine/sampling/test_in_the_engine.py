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
