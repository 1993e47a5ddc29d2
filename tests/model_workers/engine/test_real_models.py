"""The engine over models of transformers: its answers are those of transformers' own loop, whatever else happens."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from model_workers.engine.checkpoint import load_engine
from model_workers.engine.paged_engine import PagedEngine
from model_workers.engine.protocol import Sampling, SequenceEnd
from sluice.settings import ModelSettings
from tests.support.sequences import Answers, sequence_spec
from tests.support.settings import tuned
from tests.support.tiny_models import VOCABULARY, save_model

FAMILIES = ("llama", "gpt2")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp(request.param), request.param)


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
