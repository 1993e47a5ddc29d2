"""The CUDA path holds against the CPU path. Runs where there is a device: scripts/gpu."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_workers.engine.checkpoint import load_engine
from model_workers.engine.forward import load_model
from model_workers.engine.forward.flash import FLASH_BLOCK_TOKENS
from model_workers.engine.forward.linear import FP8_CAPABILITY
from model_workers.engine.paged_model import PagedModel, SequenceChunk
from model_workers.engine.protocol import Sampling
from model_workers.engine.sampling.sampler import DrawRequest, Sampler
from sluice.settings import ModelSettings
from tests.support.sequences import drive, sequence_spec
from tests.support.tiny_models import VOCABULARY, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONTEXT = 1024
SIZES = {"max_position_embeddings": CONTEXT, "hidden_size": 64, "num_attention_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES),
    "mistral": ("mistral", SIZES | {"sliding_window": 300}),
    "qwen2": ("qwen2", SIZES),
    "qwen3": ("qwen3", SIZES),
    "gemma": ("gemma", SIZES),
    "gemma2": ("gemma2", SIZES | {"sliding_window": 300}),
    "phi": ("phi", SIZES),
    "gpt2": ("gpt2", {}),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, changes = MODELS[request.param]
    return save_model(tmp_path_factory.mktemp(family), family, **changes)


def stepped(model: PagedModel, block_tokens: int, context: int) -> Tensor:
    """All logits of rows that are prefilled in chunks, mixed, and decoded."""
    numbers = random.Random(2)
    lengths = [n for n in (3, 40, 255, 256, 257, 700) if n + 8 <= context]
    rows = [[numbers.randrange(VOCABULARY) for _ in range(n + 8)] for n in lengths]
    free = numbers.sample(range(model.num_blocks), model.num_blocks)
    tables = [[free.pop() for _ in range(-(-len(row) // block_tokens))] for row in rows]
    found: list[Tensor] = []
    for row, length, table in zip(rows, lengths, tables, strict=True):
        middle = length // 2
        if middle:
            model.forward([SequenceChunk(row[:middle], 0, table, 0)])
        found.append(model.forward([SequenceChunk(row[middle:length], middle, table, 1)]).cpu())
    for step in range(8):
        chunks = [
            SequenceChunk(row[length + step : length + step + 1], length + step, table, 1)
            for row, length, table in zip(rows, lengths, tables, strict=True)
        ]
        found.append(model.forward(chunks).cpu())
    return torch.cat(found)


def logits_of(folder: Path, device: str, dtype: str) -> Tensor:
    loaded = load_model(str(folder), device=device, dtype=dtype)
    context, size = loaded.context_tokens, loaded.block_tokens()
    return stepped(loaded.paged(8 * -(-context // size), size, 8), size, context)


def error(found: Tensor, expected: Tensor) -> float:
    """The root of the mean square of the difference, relative to what is expected."""
    return float((found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())


def test_logits_are_those_of_the_cpu(folder: Path) -> None:
    expected, found = (logits_of(folder, device, "float32") for device in ("cpu", "cuda"))
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()


def test_bfloat16_costs_no_more_than_on_a_cpu(folder: Path) -> None:
    expected = logits_of(folder, "cpu", "float32")
    on_cpu, on_cuda = (logits_of(folder, device, "bfloat16") for device in ("cpu", "cuda"))
    # How much depends on the model: Qwen3 norms queries and keys, and is four times further away than Llama.
    assert error(on_cuda, expected) < 1.5 * error(on_cpu, expected)


def test_a_row_alone_and_among_others_with_graphs(tmp_path: Path) -> None:
    loaded = load_model(str(save_model(tmp_path, "llama", **SIZES)), device="cuda")
    model = loaded.paged(8 * CONTEXT // FLASH_BLOCK_TOKENS, FLASH_BLOCK_TOKENS, 8)
    assert sorted(model._graphs._captured) == [1, 2, 4, 8]  # type: ignore[attr-defined]
    for row in range(5):
        model.forward([SequenceChunk(range(20 + row), 0, (row,), 0)])
    chunks = [SequenceChunk((7,), 20 + row, (row,), 1) for row in range(5)]
    together = model.forward(chunks).clone()
    alone = torch.cat([model.forward([chunk]).clone() for chunk in chunks])
    torch.testing.assert_close(alone, together, atol=2e-2, rtol=2e-2)


def test_a_step_does_not_wait_for_the_device(tmp_path: Path) -> None:
    loaded = load_model(str(save_model(tmp_path, "llama", **SIZES)), device="cuda")
    model = loaded.paged(8, FLASH_BLOCK_TOKENS, 2)
    chunks = [[SequenceChunk(range(30), 0, (0,), 1)], [SequenceChunk((3,), 30, (0,), 1)]]
    for step in chunks:
        model.forward(step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in chunks:
            model.forward(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_second_device_captures_from_another_thread(tmp_path: Path) -> None:
    settings = ModelSettings(
        name="tiny", path=str(save_model(tmp_path, "llama", **SIZES)), device="cuda:1", slots=4
    )
    engine = load_engine(settings)
    before = torch.cuda.memory_allocated(0)
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(drive, engine, sequence_spec("r", [1, 2, 3])).result()
    assert len(answers.tokens["r"]) == 8
    assert torch.cuda.memory_allocated(0) == before


@pytest.mark.parametrize("top_p", [0.5, 0.95])
def test_draws_are_those_of_the_cpu(top_p: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(16, 32000) * 3
    found = []
    for device in ("cpu", "cuda"):
        rows = [
            sequence_spec(f"r{i}", [1], Sampling(1, 1.0, top_p=top_p, seed=i)) for i in range(16)
        ]
        sampler = Sampler()
        requests = [DrawRequest(sampler.open(row)) for row in rows]
        found.append([drawn.token_ids for drawn in sampler.draw(logits.to(device), requests)])
    assert found[0] == found[1]


def test_overlapped_steps_answer_alike_and_wait_once(tmp_path: Path) -> None:
    folder = str(save_model(tmp_path, "llama", **SIZES))
    settings = ModelSettings(name="tiny", path=folder, device="cuda", slots=4, prefill_tokens=64)
    samplings = [Sampling(24), Sampling(24, temperature=0.8, top_p=0.9, seed=3)]
    rows = [sequence_spec(f"r{i}", range(3 + i, 40 + 9 * i), samplings[i % 2]) for i in range(7)]
    one_by_one = load_engine(settings)
    one_by_one._overlap = False
    expected = drive(one_by_one, *rows)
    engine = load_engine(settings)
    assert engine._overlap
    assert drive(engine, *rows) == expected
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        # The event behind the copy of the draws is the one thing that is waited for.
        again = drive(engine, *(replace(row, attempt=1) for row in rows))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert again.tokens == expected.tokens


def test_eight_bits_cost_no_more_than_on_a_cpu(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("this device multiplies no 8-bit floats")
    folder = str(save_model(tmp_path, "llama", **SIZES))
    steps = [
        [SequenceChunk(range(90), 0, (0,), 1), SequenceChunk(range(5, 95), 0, (1,), 1)],
        [SequenceChunk((3,), 90, (0,), 1), SequenceChunk((4, 5, 6), 90, (1,), 3)],
    ]
    errors: dict[str, list[float]] = {}
    for device in ("cpu", "cuda"):
        plain, narrow = (
            load_model(folder, device=device, dtype="bfloat16", quantization=quantization).paged(
                16, FLASH_BLOCK_TOKENS, 8
            )
            for quantization in ("none", "fp8")
        )
        errors[device] = [error(narrow.forward(chunks), plain.forward(chunks)) for chunks in steps]
    for on_cpu, on_cuda in zip(errors["cpu"], errors["cuda"], strict=True):
        assert 0 < on_cuda < 1.5 * on_cpu
