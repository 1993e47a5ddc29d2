"""Log-probabilities of given tokens: those of transformers' own forward, whatever is in the cache and in the step."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from model_workers.engine.checkpoint import load_engine
from model_workers.engine.paged_engine import PagedEngine
from model_workers.engine.protocol import (
    Sampling,
    SequenceEnd,
    SequenceSpec,
)
from sluice.errors import InvalidRequest
from sluice.internal.v1 import task_pb2
from sluice.settings import ModelSettings
from tests.support.sequences import Answers, sequence_spec
from tests.support.settings import tuned
from tests.support.tiny_models import VOCABULARY, save_model


@pytest.fixture(scope="module", params=("llama", "gpt2"))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp(request.param), request.param)


def engine(folder: Path, **changes: Any) -> PagedEngine:
    values = {
        "name": "tiny", "path": str(folder), "device": "cpu", "slots": 4,
        "max_waiting_rows": 64, "prefill_tokens": 32,
    }  # fmt: skip
    return load_engine(tuned(ModelSettings, **(values | changes)))


def scored(name: str, prompt: Sequence[int], answer: Sequence[int], rank: int = 0) -> SequenceSpec:
    """A sequence for the log-probabilities of ``answer`` after ``prompt``."""
    tokens = (*prompt, *answer)[:-1]
    values = task_pb2.Values(scored_token_ids=tuple(answer))
    return SequenceSpec(name, "b", 0, tokens, (), Sampling(1), rank=rank, values=values)


def alone(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> Any:
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0].float().log_softmax(-1)
    first = len(prompt) - 1
    return logits[range(first, first + len(answer)), list(answer)].numpy()


def run(engine: PagedEngine, *sequences: SequenceSpec) -> tuple[dict[str, Any], Answers]:
    for sequence in sequences:
        engine.add(sequence, 0.0)
    values, answers = {}, Answers()
    while engine.has_sequences():
        steps = engine.step(0.0)
        answers.take(steps)
        values |= {s.request_id: np.frombuffer(s.values, "<f4") for s in steps if s.values}
    return values, answers


def test_scores_equal_the_whole_forward_pass(folder: Path) -> None:
    draw = random.Random(3)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    context = [draw.randrange(VOCABULARY) for _ in range(40)]
    pairs = [
        (context[:size], [draw.randrange(VOCABULARY) for _ in range(count)])
        for size in (1, 16, 17, 33, 40) for count in (1, 5, 40)
    ]  # fmt: skip
    sequences = [scored(str(place), *pair) for place, pair in enumerate(pairs)]
    whole = engine(folder)
    plain = run(whole, sequence_spec("answer", context, Sampling(12)))[1].tokens["answer"]
    values, answers = run(whole, sequence_spec("answer", context, Sampling(12)), *sequences)
    assert answers.tokens["answer"] == plain
    for place, pair in enumerate(pairs):
        assert values[str(place)] == pytest.approx(alone(model, *pair), abs=2e-5)
        assert answers.ends[str(place)] is SequenceEnd.STOP
    # What was computed before is in the cache now, and changes nothing.
    again, answers = run(whole, *sequences)
    for place, pair in enumerate(pairs):
        assert again[str(place)] == pytest.approx(alone(model, *pair), abs=2e-5)
    assert sum(answers.cached.values()) > 0


def test_a_row_that_is_preempted_is_computed_again(folder: Path) -> None:
    draw = random.Random(4)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt, answer = ([draw.randrange(VOCABULARY) for _ in range(size)] for size in (20, 60))
    small = engine(folder, slots=1, prefill_tokens=16)
    small.add(scored("slow", prompt, answer, rank=2), 0.0)
    small.step(0.0)
    small.step(0.0)
    values, _ = run(small, sequence_spec("urgent", prompt[:5], Sampling(3)))
    assert small.load().preemptions == 1
    assert values["slow"] == pytest.approx(alone(model, prompt, answer), abs=2e-5)


def test_many_scored_tokens_are_spread_over_steps(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("model_workers.engine.scheduler.SCORED_TOKENS", 8)
    draw = random.Random(5)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    pairs = [([7, 8, 9], [draw.randrange(VOCABULARY) for _ in range(30)]) for _ in range(3)]
    sequences = [scored(str(place), *pair) for place, pair in enumerate(pairs)]
    values, _ = run(engine(folder, prefill_tokens=256), *sequences)
    for place, pair in enumerate(pairs):
        assert values[str(place)] == pytest.approx(alone(model, *pair), abs=2e-5)


def test_alternatives_are_the_most_probable_tokens(folder: Path, monkeypatch: Any) -> None:
    """Place by place behind the log-probabilities, also where they were computed in several steps."""
    monkeypatch.setattr("model_workers.engine.scheduler.SCORED_TOKENS", 8)
    draw, count = random.Random(6), 3
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = [draw.randrange(VOCABULARY) for _ in range(30)]
    sequence = scored("r", tokens[:1], tokens[1:])
    assert sequence.values is not None
    sequence.values.scored_alternatives = count
    numbers = run(engine(folder), sequence)[0]["r"]
    size = len(tokens) - 1
    ids, scores = numbers[size : size * (1 + count)], numbers[size * (1 + count) :]
    with torch.inference_mode():
        best = model(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1).topk(count)
    assert numbers[:size] == pytest.approx(alone(model, tokens[:1], tokens[1:]), abs=2e-5)
    assert ids.astype(int).tolist() == best.indices.flatten().tolist()
    assert scores == pytest.approx(best.values.flatten().numpy(), abs=2e-5)


def test_what_cannot_be_scored_is_refused(folder: Path) -> None:
    whole = engine(folder)
    with pytest.raises(InvalidRequest, match="log-probabilities of tokens alone"):
        whole.add(SequenceSpec("r", "b", 0, (5, 6), (), Sampling(1), values=task_pb2.Values()), 0.0)
    with pytest.raises(InvalidRequest, match="not one of the model's"):
        whole.add(scored("r", (5, 6), (VOCABULARY,)), 0.0)
