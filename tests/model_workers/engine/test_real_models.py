"""The engine over models of transformers: its answers are those of transformers' own loop, whatever else happens."""

import math
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_workers.engine.checkpoint import load_engine
from model_workers.engine.paged_engine import PagedEngine
from model_workers.engine.protocol import Sampling, SequenceEnd
from sluice.settings import ModelSettings
from tests.support.sequences import Answers, drive, sequence_spec
from tests.support.settings import tuned
from tests.support.tiny_models import CONTEXT, VOCABULARY, save_model, tiny_model

FAMILIES = ("llama", "gpt2")
SAMPLINGS = (
    Sampling(24),
    Sampling(24, temperature=1.0, seed=7),
    Sampling(24, temperature=0.8, top_k=20, top_p=0.9, seed=8, repetition_penalty=1.3),
)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


def engine(folder: Path, **changes: Any) -> PagedEngine:
    values = {
        "name": "tiny",
        "path": str(folder),
        "device": "cpu",
        "slots": 4,
        "max_waiting_rows": 64,
        "prefill_tokens": 32,
    }
    return load_engine(tuned(ModelSettings, **(values | changes)))


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Lengths on both sides of blocks and of the prefill budget."""
    numbers = random.Random(seed)
    lengths = [numbers.choice((1, 2, 5, 9, 16, 17, 31, 32, 33, 70, 100)) for _ in range(count)]
    return [[numbers.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


@cache
def reference(folder: Path) -> Any:
    """transformers' model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def generated(folder: Path, prompt: list[int], tokens: int) -> list[int]:
    """What transformers' own loop answers."""
    output = reference(folder).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


def test_greedy_answers_equal_generate_under_preemption(folder: Path) -> None:
    # The least cache that holds a sequence of the context: 16 blocks.
    core = engine(folder, slots=8, cache_gb=17.5 * _block_bytes(folder) / 1e9)
    assert core.load().cache_blocks == 17
    asked = {f"r{i}": (prompt, 20 + 3 * i) for i, prompt in enumerate(prompts(10))}
    sequences = [
        sequence_spec(name, prompt, Sampling(n), rank=0 if n > 35 else 2)
        for name, (prompt, n) in asked.items()
    ]
    answers = Answers()
    while sequences or core.has_sequences():
        if core.load().steps % 5 == 0:
            for sequence in sequences[:2]:
                core.add(sequence, 0.0)
            del sequences[:2]
        answers.take(core.step(0.0))
    assert core.load().preemptions > 0
    expected = {name: generated(folder, prompt, n) for name, (prompt, n) in asked.items()}
    assert answers.tokens == expected
    assert set(answers.ends.values()) == {SequenceEnd.LENGTH}


def _block_bytes(folder: Path) -> int:
    from model_workers.engine.forward import load_model

    return load_model(str(folder), device="cpu").bytes_per_block(32)


@settings(max_examples=15)
@given(st.sampled_from(SAMPLINGS), st.integers(0, 23), st.integers(0, 3), st.integers(0, 9))
def test_a_resumed_row_answers_as_if_nothing_had_happened(
    llama: Path, sampling: Sampling, cut: int, neighbours: int, seed: int
) -> None:
    prompt, *others = prompts(4, seed)
    core = engine(llama)
    whole = drive(core, sequence_spec("r", prompt, sampling)).tokens["r"]
    again = sequence_spec("r", prompt, sampling, produced=whole[:cut], attempt=1)
    beside = [sequence_spec(f"n{i}", other) for i, other in enumerate(others[:neighbours])]
    rest = drive(core, *beside, again).tokens["r"]
    assert whole[:cut] + rest == whole


def test_blocks_of_a_sequence_with_broken_numbers_are_cleared(
    tmp_path: Path,
) -> None:
    model = tiny_model(seed=4)
    model.model.embed_tokens.weight.data[13] = math.nan
    model.save_pretrained(tmp_path)
    core = engine(tmp_path)
    sequences = [
        sequence_spec("good", [1, 2, 3], Sampling(6)),
        sequence_spec("bad", [4, 13] + [5] * 20, Sampling(6)),
        sequence_spec("late", [6], Sampling(6)),
    ]
    answers = drive(core, *sequences, sequence_spec("next", [7, 8], Sampling(6)))
    ends = {name: end for name, end in answers.ends.items() if end is SequenceEnd.FAILED}
    assert ends == {"bad": SequenceEnd.FAILED}
    # The next sequence fills the blocks that the broken one had.
    after = drive(core, sequence_spec("after", [9] * 100, Sampling(6)))
    assert after.tokens["after"] == generated(tmp_path, [9] * 100, 6)
    assert answers.tokens["good"] == generated(tmp_path, [1, 2, 3], 6)


def test_logprobs_are_those_of_the_logits(llama: Path) -> None:
    core = engine(llama)
    core.add(sequence_spec("r", [1, 2, 3], Sampling(1, logprobs=True, top_logprobs=3)), 0.0)
    (step,) = core.step(0.0)
    model = tiny_model("llama").to(torch.bfloat16).float()
    with torch.inference_mode():
        expected = model(torch.tensor([[1, 2, 3]])).logits[0, -1].log_softmax(-1)
    best = expected.topk(3)
    assert step.logprobs[0].logprob == pytest.approx(float(best.values[0]), abs=1e-4)
    assert [token for token, _ in step.logprobs[0].top] == best.indices.tolist()


def test_the_context_of_the_model_is_kept(llama: Path) -> None:
    answers = drive(engine(llama), sequence_spec("r", [1] * (CONTEXT - 3), Sampling(50)))
    assert (len(answers.tokens["r"]), answers.ends["r"]) == (3, SequenceEnd.LENGTH)
