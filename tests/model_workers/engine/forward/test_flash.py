"""What the flash kernel and the graphs are given, held on a CPU with the kernel written out plainly."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_workers.engine.forward import load_model
from model_workers.engine.forward.flash import (
    SIZES,
    DecodeGraphs,
    FlashAttention,
    FlashKvCache,
    flash_fits,
)
from model_workers.engine.forward.kv_cache import LayerShape
from model_workers.engine.forward.llama import FusedModel
from model_workers.engine.paged_model import RowChunk
from tests.support.tiny_models import CONTEXT, VOCABULARY, save_model

BLOCK_TOKENS = 8
NUM_BLOCKS = 64


def plain_kernel(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int,
) -> Tensor:
    """`varlen_attn` over block tables, row by row."""
    assert enable_gqa
    assert num_splits == 1
    assert window_size[1] == 0
    assert {t.dtype for t in (query_ends, key_ends, seqused_k, block_table)} == {torch.int32}
    assert (key_ends[1:] - key_ends[:-1]).tolist() == seqused_k.tolist()
    answers = torch.empty_like(query)
    for row, length in enumerate(seqused_k.tolist()):
        first, end = query_ends[row : row + 2].tolist()
        assert end - first <= longest_query
        assert length <= longest_keys
        blocks = block_table[row, : -(-length // keys.shape[1])].long()
        group = query.shape[1] // keys.shape[2]
        key, value = (
            part[blocks].flatten(0, 1)[:length].repeat_interleave(group, 1)
            for part in (keys, values)
        )
        place = torch.arange(length)
        asking = torch.arange(length - (end - first), length)[:, None]
        hidden = place > asking
        if window_size[0] >= 0:
            hidden |= place < asking - window_size[0]
        scores = torch.einsum("qhd,khd->hqk", query[first:end], key) * scale
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        answers[first:end] = torch.einsum("hqk,khd->qhd", shares, value)
    return answers


class Replays:
    """Captures as a graph does: what is repeated later reads the arrays as they are then."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        self.captured += 1
        logits = compute().clone()

        def replay() -> None:
            self.replayed += 1
            logits.copy_(compute())

        return replay, logits


@pytest.fixture(params=["llama", "mistral"])
def models(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, FusedModel, Replays]:
    """The same model on pages for a CPU, and on pages for the kernel with graphs."""
    folder = str(save_model(tmp_path, request.param))
    plain = load_model(folder, device="cpu").paged(NUM_BLOCKS, BLOCK_TOKENS)
    loaded = load_model(folder, device="cpu")
    pages = FlashKvCache(
        loaded._shapes,
        num_blocks=NUM_BLOCKS,
        block_tokens=BLOCK_TOKENS,
        dtype=loaded.dtype,
        device=loaded.device,
    )
    replays = Replays()
    attention = FlashAttention(pages, plain_kernel)
    model = FusedModel(loaded._model, attention, CONTEXT)
    model._graphs = DecodeGraphs(attention, model._compute, CONTEXT, replays)
    return plain, model, replays


def test_logits_are_those_of_the_cpu_path(models: tuple[Any, FusedModel, Replays]) -> None:
    plain, flash, replays = models
    numbers = random.Random(5)
    free = numbers.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    rows = [[numbers.randrange(VOCABULARY) for _ in range(60)] for _ in range(5)]
    tables = [[free.pop() for _ in range(8)] for _ in rows]
    done = [0] * len(rows)
    for sizes in (
        (17, 1, 5, 40, 2),
        (1, 1, 1, 1, 1),
        (1, 0, 1, 1, 0),
        (20, 3, 0, 1, 1),
        (1, 1, 1, 1, 1),
    ):
        chunks = []
        for row, count in enumerate(sizes):
            if count:
                tokens = rows[row][done[row] : done[row] + count]
                chunks.append(RowChunk(tokens, done[row], tables[row], 1))
                done[row] += count
        torch.testing.assert_close(
            flash.forward(chunks), plain.forward(chunks), atol=1e-4, rtol=1e-4
        )
    assert (replays.captured, replays.replayed) == (2, 3)
    flash.copy_blocks([(tables[0][0], tables[1][0])])
    flash.clear_blocks([tables[2][0]])
    keys = flash._attention.cache.keys[0]
    assert torch.equal(keys[tables[0][0]], keys[tables[1][0]])
    assert not keys[tables[2][0]].any()


def test_filling_up_writes_only_into_the_spare_block(
    models: tuple[Any, FusedModel, Replays],
) -> None:
    _, flash, _ = models
    flash.forward([RowChunk((5,), 0, (row,), 1) for row in range(3)])
    keys = flash._attention.cache.keys[0]
    written = keys.flatten(1).any(1)
    assert written.nonzero().flatten().tolist() == [0, 1, 2, NUM_BLOCKS]


def test_larger_steps_and_drafts_run_without_a_graph(
    models: tuple[Any, FusedModel, Replays],
) -> None:
    _, flash, replays = models
    flash.forward([RowChunk((1, 2), 0, (0,), 2)])
    flash.forward([RowChunk((1,), 0, (0,), 0)])
    flash.forward([RowChunk((1,), 0, (row % NUM_BLOCKS,), 1) for row in range(SIZES[-1] + 1)])
    assert replays.captured == 0


def test_the_kernel_is_not_for_cpus() -> None:
    assert not flash_fits([LayerShape(4, 2, 64, 64)], torch.bfloat16, torch.device("cpu"))
