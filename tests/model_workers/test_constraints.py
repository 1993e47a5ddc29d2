"""Constrained answers over the tokenizer of a shipped model."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from model_workers import constraints as module
from model_workers.constraints import (
    CompiledGrammar,
    ConstraintCompiler,
    TokenMatcher,
    with_end,
)
from model_workers.engine.sampling.sampler import DrawRequest, Sampler
from model_workers.engine.weights import find_constraints
from sluice.constraints import json_grammar
from sluice.errors import InvalidRequest
from tests.model_workers.engine.sampling.sequences import spec

FILE = Path(module.__file__).parent / "models" / "small" / "tokenizer.json"
TOKENIZER = Tokenizer.from_file(str(FILE))
END = TOKENIZER.token_to_id("<|end|>")
WIDTH = 1040
"""Of the logits: more than the tokenizer has tokens, as where a model's vocabulary is padded."""
STOPS = frozenset({END, 1})
BLANKS = [i for i in range(1024) if not TOKENIZER.decode([i], skip_special_tokens=False).strip()]
BUDGET = 400


@pytest.fixture(scope="module")
def grammars() -> ConstraintCompiler:
    return ConstraintCompiler(with_end(json.loads(FILE.read_text(encoding="utf-8"))))


def answer(
    grammars: ConstraintCompiler, seed: int, produced: Sequence[int] = (), **sampling: Any
) -> list[int]:
    """The whole answer of a model whose logits are random, but depend on the token before."""
    sampler = Sampler(grammars)
    sampling = {"stop_token_ids": STOPS, "temperature": 1.0, "seed": seed} | sampling
    sequence = sampler.open(spec([7], produced, **sampling))
    tokens = list(produced)
    while len(tokens) < BUDGET and not (tokens and tokens[-1] in STOPS):
        before = tokens[-1] if tokens else 7
        logits = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed ^ before)) * 3
        logits[BLANKS] -= 6
        (drawn,) = sampler.draw(logits[None], [DrawRequest(sequence)])
        assert not drawn.error
        tokens += drawn.token_ids
    return tokens


def text_of(tokens: Sequence[int]) -> str:
    """The text of an answer that has ended."""
    assert tokens[-1] in STOPS, "the answer did not end"
    assert not STOPS & set(tokens[:-1])
    return str(TOKENIZER.decode(list(tokens[:-1]), skip_special_tokens=True))


# The library computes numbers in doubles.
NUMBERS = st.integers(-(2**53), 2**53)
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-50, 50),
        st.integers(0, 200),
    ),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 6)),
    st.just({"type": "string", "pattern": "^[a-c]{2,4}$"}),
    st.just({"type": "string", "format": "date"}),
    st.builds(
        lambda values: {"enum": values},
        st.lists(
            st.one_of(st.text(max_size=4), NUMBERS, st.booleans(), st.none()),
            min_size=1,
            max_size=4,
            unique_by=json.dumps,
        ),
    ),
    st.builds(lambda value: {"const": value}, st.text(max_size=5)),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most},
            inner,
            st.integers(0, 3),
        ),
        st.builds(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:1],
                "additionalProperties": False,
            },
            st.dictionaries(st.text("abé ", min_size=1, max_size=3), inner, max_size=3),
        ),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    ),
    max_leaves=5,
)


@given(SCHEMAS, st.integers(0, 2**20), st.floats(0, 1))
def test_answers_are_what_the_schema_accepts(
    grammars: ConstraintCompiler, schema: dict[str, Any], seed: int, share: float
) -> None:
    text = json.dumps(schema)
    tokens = answer(grammars, seed, json_schema=text)
    jsonschema.validate(json.loads(text_of(tokens)), schema)
    resumed = tokens[: int(share * (len(tokens) - 1))]
    assert answer(grammars, seed, resumed, json_schema=text) == tokens


PADDED = (
    ('{"topic":"refund","n":2}', True),
    ('{"topic": "refund", "n": 2}', True),
    ('{ "topic":"refund","n":2}', False),
    ('{"topic" :"refund","n":2}', False),
    ('{"topic":  "refund","n":2}', False),
    ('{"topic":"refund",\n"n":2}', False),
    ('{"topic":"refund","n":2 }', False),
)


@pytest.mark.parametrize(("text", "is_taken"), PADDED)
def test_json_is_not_padded(grammars: ConstraintCompiler, text: str, is_taken: bool) -> None:
    properties = {"topic": {"type": "string"}, "n": {"type": "integer"}}
    schema = json.dumps({"type": "object", "properties": properties, "required": [*properties]})
    sampling = spec([7], (), json_schema=schema, stop_token_ids=STOPS).sampling
    tokens = [*TOKENIZER.encode(text, add_special_tokens=False).ids, END]
    assert (grammars.open(sampling).take(tokens) == len(tokens)) == is_taken


PIECES = st.sampled_from(
    [
        "a",
        "b",
        "é",
        "[0-9]",
        "[0-9]{2}",
        "[^a-z\\n]",
        "(?:ab|c)",
        "(?:yes|no|maybe)?",
        "\\.",
        "x{0,3}",
        "€",
        " ",
    ]
)
REGEXES = st.lists(PIECES, max_size=5).map("".join)


@given(st.lists(REGEXES, min_size=1, max_size=3), st.integers(0, 2**20), st.floats(0, 1))
def test_answers_are_what_the_regex_matches(
    grammars: ConstraintCompiler, parts: list[str], seed: int, share: float
) -> None:
    regex = "|".join(parts)
    tokens = answer(grammars, seed, regex=regex)
    assert re.fullmatch(regex, text_of(tokens))
    resumed = tokens[: int(share * (len(tokens) - 1))]
    assert answer(grammars, seed, resumed, regex=regex) == tokens


@given(st.integers(0, 2**20), st.data())
def test_masks_are_the_same_behind_drafts(
    grammars: ConstraintCompiler, seed: int, data: st.DataObject
) -> None:
    """Drafts that the grammar takes, drafts that it does not, and ends among them leave the matcher where it was."""
    chosen = spec(regex="(?:ab|c)[0-9]{1,3}(?:é|x){0,5}", stop_token_ids=STOPS).sampling
    tokens = answer(grammars, seed, regex=chosen.regex)
    matcher, other = grammars.open(chosen), grammars.open(chosen)
    for place, token in enumerate(tokens):
        drafted = data.draw(
            st.one_of(
                st.integers(0, 4).map(lambda n, at=place: tokens[at:][:n]),  # type: ignore[misc]
                st.lists(st.integers(0, WIDTH), max_size=3),
            )
        )
        matcher.give_back(matcher.take(drafted))
        assert matcher.mask().tolist() == other.mask().tolist()
        assert matcher.take([token]) == other.take([token]) == 1
    assert not matcher.mask().any()


def test_greedy_answers_are_held_as_well(grammars: ConstraintCompiler) -> None:
    tokens = answer(grammars, 3, temperature=0.0, regex="[0-9]{3} (?:units|tickets)")
    assert re.fullmatch("[0-9]{3} (?:units|tickets)", text_of(tokens))


def test_stop_token_needs_a_complete_answer(
    grammars: ConstraintCompiler,
) -> None:
    sequence = grammars.open(spec(regex="ab", stop_token_ids=STOPS).sampling)
    assert sequence.take([END]) == 0
    assert sequence.take(TOKENIZER.encode("ab").ids) > 0
    assert sequence.take([END]) == 1
    assert sequence.take([END]) == 0


@pytest.mark.parametrize(
    "changes", [{"regex": "(a"}, {"json_schema": "[]"}, {"json_schema": '{"not": {}}'}]
)
def test_a_constraint_that_cannot_be_held_is_refused(
    grammars: ConstraintCompiler, changes: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match="cannot be enforced") as caught:
        Sampler(grammars).open(spec(stop_token_ids=STOPS, **changes))
    assert caught.value.violations[0].field == f"sampling.{next(iter(changes))}"


def test_what_grows_over_the_limits_ends_its_row_only(grammars: ConstraintCompiler) -> None:
    sampler = Sampler(grammars)
    large = sampler.open(spec(regex="(a{1000}){1000}", stop_token_ids=STOPS))
    other = sampler.open(spec(regex="b+", stop_token_ids=STOPS))
    for _ in range(4):
        found = sampler.draw(torch.zeros(2, WIDTH), [DrawRequest(large), DrawRequest(other)])
        assert not found[1].error
        if found[0].error:
            break
    assert found[0].error.startswith("is too complex; make it simpler")
    assert found[0].field == "sampling.regex"


DEAD_END = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
    "patternProperties": {"^a$": {"type": "boolean"}},
}
"""Valid; but the library allows a comma behind the only property."""


def test_a_dead_end_blames_the_constraint(
    grammars: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    resets: list[CompiledGrammar] = []
    monkeypatch.setattr(CompiledGrammar, "reset", resets.append)
    sampler = Sampler(grammars)
    sequence = sampler.open(spec(json_schema=json.dumps(DEAD_END), stop_token_ids=STOPS))
    wanted = TOKENIZER.encode('{"a": true, ', add_special_tokens=False).ids
    for token in [*wanted, END]:
        logits = torch.zeros(1, WIDTH)
        logits[0, token] = 9.0
        (found,) = sampler.draw(logits, [DrawRequest(sequence)])
        if found.error:
            break
    assert found.field == "sampling.json_schema"
    assert "dead end" in found.error
    assert not resets, "others keep the parser states of the grammar"


def test_rows_do_not_use_up_what_a_grammar_may_find_out(
    grammars: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewals = []
    renew = CompiledGrammar.reset
    monkeypatch.setattr(CompiledGrammar, "reset", lambda self: (renewals.append(1), renew(self)))
    regex = r"(\w{1,20} ){1,60}"
    for seed in range(12):
        sequence, pick = (
            grammars.open(spec(regex=regex, stop_token_ids=STOPS).sampling),
            Random(seed),
        )
        tokens: list[int] = []
        while (allowed := allowed_by(sequence)) != sorted(STOPS) and len(tokens) < 150:
            tokens.append(pick.choice([token for token in allowed if token not in STOPS]))
            assert sequence.take(tokens[-1:]) == 1
        again = grammars.open(spec(regex=regex, stop_token_ids=STOPS).sampling)
        assert again.take(tokens) == len(tokens)
        assert allowed_by(again) == allowed
    assert renewals


def test_grammars_that_compile_slowly_are_reset_every_time() -> None:
    tokenizer = with_end(json.loads(FILE.read_text(encoding="utf-8")))
    properties = {f"key{number}": {"type": "integer"} for number in range(900)}
    schema = json_grammar(json.dumps({"type": "object", "properties": properties}))
    grammar = CompiledGrammar(schema, tokenizer)
    for _ in range(3):
        grammar.prepare()
        assert grammar.reset()
    assert not grammar.reset(), "the engine's thread does not compile it"


def allowed_by(sequence: TokenMatcher) -> list[int]:
    """The tokens in the mask."""
    bits = np.unpackbits(sequence.mask().view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def test_the_cache_is_bounded_by_bytes(grammars: ConstraintCompiler) -> None:
    limit = 16 << 20
    few = ConstraintCompiler(grammars._tokenizer, cache_bytes=limit)
    for i in range(6):
        properties = {f"key{i}_{j}": {"type": "integer"} for j in range(900)}
        schema = json.dumps({"type": "object", "properties": properties})
        few.open(spec(json_schema=schema, stop_token_ids=STOPS).sampling)
        assert few.size_bytes <= limit
    assert 1 <= len(few._compiled) < 6


def test_parser_states_count_as_bytes(grammars: ConstraintCompiler) -> None:
    few = ConstraintCompiler(grammars._tokenizer)
    sequence = few.open(spec(regex="a+", stop_token_ids=STOPS).sampling)
    before = few.size_bytes
    for _ in range(50):
        sequence.mask()
    assert few.size_bytes > before


def test_a_tokenizer_whose_text_is_not_known_byte_for_byte(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": {"w0": 0, "w1": 1}, "unk_token": "w0"}
    file.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with pytest.raises(ValueError, match="decoder"):
        ConstraintCompiler(with_end(json.loads(file.read_text(encoding="utf-8"))))
    assert find_constraints(str(tmp_path)) is None


def test_a_model_without_tokenizer(tmp_path: Path) -> None:
    assert find_constraints(str(tmp_path)) is None
