"""Both engines draw the same tokens for every field of sampling: the shipped small tier through each."""

from typing import Any

import pytest

from gateway.config.models import ModelFolder
from model_workers.engine.checkpoint import load_engine
from model_workers.engine.generate.load import load_generate
from model_workers.engine.protocol import Engine, Sampling, SequenceSpec
from sluice.settings import ModelSettings

SETTINGS: dict[str, Any] = {"name": "m", "path": "builtin:small", "device": "cpu", "slots": 8}
PROMPTS = ("Sort these numbers: 3, 1, 2", "Question: what is 12 plus 30?", "Say hello.")
DRAWN = {"temperature": 1.0, "seed": 3}
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": DRAWN,
    "top_p": {**DRAWN, "top_p": 0.6},
    "top_k": {**DRAWN, "top_k": 3},
    "min_p": {**DRAWN, "min_p": 0.2},
    "repetition_penalty": {**DRAWN, "repetition_penalty": 1.5},
    "presence_penalty": {**DRAWN, "presence_penalty": 1.0},
    "frequency_penalty": {**DRAWN, "frequency_penalty": 1.0},
    "logit_bias": {**DRAWN, "logit_bias": ((40, 5.0), (41, -100.0))},
    "min_tokens": {"min_tokens": 12},
    "logprobs": {**DRAWN, "logprobs": True, "top_logprobs": 3},
    "regex": {**DRAWN, "regex": "[0-9]{3}-[a-f]+"},
    "json_schema": {**DRAWN, "json_schema": '{"type": "array", "items": {"type": "boolean"}}'},
    "grammar": {**DRAWN, "grammar": 'start: "yes" | "no"'},
}


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    paged = load_engine(ModelSettings(**SETTINGS, cache_gb=0.05))
    return paged, load_generate(ModelSettings(**SETTINGS, engine="generate"))


@pytest.mark.parametrize("field", FIELDS)
def test_both_engines_draw_the_same_tokens(field: str, engines: tuple[Engine, Engine]) -> None:
    tokenizer = ModelFolder(ModelSettings(**SETTINGS)).tokenizer
    sampling = Sampling(16, stop_token_ids=tokenizer.stop_token_ids, **FIELDS[field])
    sequences = [
        SequenceSpec(str(n), "b", 0, tuple(tokenizer.encode_text(prompt)), (), sampling)
        for n, prompt in enumerate(PROMPTS)
    ]
    (paged, theirs), (whole, ours) = (answers(engine, sequences) for engine in engines)
    assert whole == paged
    assert all(whole.values())
    assert ours == pytest.approx(theirs, abs=1e-3)
    assert bool(ours) == ("logprobs" in field)


def answers(
    engine: Engine, sequences: list[SequenceSpec]
) -> tuple[dict[str, tuple[tuple[int, ...], object]], list[float]]:
    """Compute all sequences; returns tokens and end of each, and all log-probabilities in order."""
    found: dict[str, tuple[tuple[int, ...], object]] = {
        sequence.request_id: ((), None) for sequence in sequences
    }
    logprobs: dict[tuple[str, int], float] = {}
    for sequence in sequences:
        engine.add(sequence, 0.0)
    while engine.has_sequences():
        for step in engine.step(0.0):
            assert not step.error
            found[step.request_id] = (found[step.request_id][0] + step.token_ids, step.end)
            for index, entry in enumerate(step.logprobs, step.start_index):
                logprobs[step.request_id, index] = entry.logprob
    return found, [logprobs[key] for key in sorted(logprobs)]
