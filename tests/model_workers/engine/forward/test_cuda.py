"""The CUDA path holds against the CPU path. Runs where there is a device: scripts/gpu."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_workers.engine.forward import load_model
from model_workers.engine.forward.flash import FLASH_BLOCK_TOKENS
from model_workers.engine.paged_model import PagedModel, RowChunk
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
            model.forward([RowChunk(row[:middle], 0, table, 0)])
        found.append(model.forward([RowChunk(row[middle:length], middle, table, 1)]).cpu())
    for step in range(8):
        chunks = [
            RowChunk(row[length + step : length + step + 1], length + step, table, 1)
            for row, length, table in zip(rows, lengths, tables, strict=True)
        ]
        found.append(model.forward(chunks).cpu())
    return torch.cat(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_those_of_the_cpu(folder: Path, dtype: str) -> None:
    on_cpu = load_model(str(folder), device="cpu", dtype="float32")
    on_cuda = load_model(str(folder), device="cuda", dtype=dtype)
    context = on_cpu.context_tokens
    size = on_cuda.block_tokens()
    expected = stepped(on_cpu.paged(8 * -(-context // 32), 32), 32, context)
    found = stepped(on_cuda.paged(8 * -(-context // size), size), size, context)
    loose = dtype == "bfloat16"
    scale = expected.abs().max().item()
    assert (found - expected).abs().max().item() < (0.05 if loose else 1e-3) * scale


def test_a_row_alone_and_among_others_with_graphs(tmp_path: Path) -> None:
    loaded = load_model(str(save_model(tmp_path, "llama", **SIZES)), device="cuda")
    model = loaded.paged(8 * CONTEXT // FLASH_BLOCK_TOKENS, FLASH_BLOCK_TOKENS)
    for row in range(5):
        model.forward([RowChunk(range(20 + row), 0, (row,), 0)])
    chunks = [RowChunk((7,), 20 + row, (row,), 1) for row in range(5)]
    together = model.forward(chunks).clone()
    alone = torch.cat([model.forward([chunk]).clone() for chunk in chunks])
    torch.testing.assert_close(alone, together, atol=2e-2, rtol=2e-2)


def test_a_step_does_not_wait_for_the_device(tmp_path: Path) -> None:
    loaded = load_model(str(save_model(tmp_path, "llama", **SIZES)), device="cuda")
    model = loaded.paged(8, FLASH_BLOCK_TOKENS)
    chunks = [[RowChunk(range(30), 0, (0,), 1)], [RowChunk((3,), 30, (0,), 1)]]
    for step in chunks:
        model.forward(step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in chunks:
            model.forward(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
