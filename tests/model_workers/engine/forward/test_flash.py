"""What the flash kernel and the graphs are given, held on a CPU with the kernel written out plainly."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_workers.engine.forward import flash, load_model
from model_workers.engine.forward.flash import (
    DecodeGraphs,
    FlashAttention,
    FlashKvCache,
    flash_fits,
)
from model_workers.engine.forward.kv_cache import LayerShape
from model_workers.engine.forward.llama import FusedModel
from model_workers.engine.paged_model import SequenceChunk
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
    single = longest_query == 1 and window_size[0] < 0
    assert window_size[1] == (-1 if single else 0)
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

    def __init__(self, smallest: int = 1) -> None:
        self.smallest = smallest
        self.captured: list[int] = []
        self.replayed: list[int] = []

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        logits = compute().clone()
        if len(logits) < self.smallest:
            raise torch.OutOfMemoryError("out of memory")
        self.captured.append(len(logits))

        def replay() -> None:
            self.replayed.append(len(logits))
            logits.copy_(compute())

        return replay, logits


Models = tuple[Any, FusedModel, Replays]


@pytest.fixture(params=["llama", "mistral"])
def models(request: pytest.FixtureRequest, tmp_path: Path) -> Models:
    """The same model on pages for a CPU, and on pages for the kernel with graphs of up to 8 tokens."""
    return with_graphs(tmp_path, request.param, Replays(), 8)


def with_graphs(folder_of: Path, family: str, replays: Replays, tokens: int) -> Models:
    folder = str(save_model(folder_of, family))
    plain = load_model(folder, device="cpu").paged(NUM_BLOCKS, BLOCK_TOKENS)
    loaded = load_model(folder, device="cpu")
    pages = FlashKvCache(
        loaded._shapes,
        num_blocks=NUM_BLOCKS,
        block_tokens=BLOCK_TOKENS,
        dtype=loaded.dtype,
        device=loaded.device,
    )
    attention = FlashAttention(pages, plain_kernel)
    model = FusedModel(loaded._model, attention, CONTEXT)
    model._graphs = DecodeGraphs(attention, model._compute, CONTEXT, replays)
    model.capture_graphs(tokens)
    return plain, model, replays


STEPS = ((17, 1, 5, 40, 2), (1, 1, 1, 1, 1), (1, 0, 1, 1, 0), (20, 3, 0, 1, 1), (1, 1, 1, 1, 1))
"""How many tokens of each of five rows a step computes."""


def test_logits_are_those_of_the_cpu_path(models: Models) -> None:
    plain, flash, replays = models
    numbers = random.Random(5)
    free = numbers.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    rows = [[numbers.randrange(VOCABULARY) for _ in range(60)] for _ in range(5)]
    tables = [[free.pop() for _ in range(8)] for _ in rows]
    done = [0] * len(rows)
    for step, sizes in enumerate(STEPS):
        chunks = []
        for row, count in enumerate(sizes):
            if count:
                tokens = rows[row][done[row] : done[row] + count]
                # Also chunks of drafts, whose every token is asked for, and of prompts that go on.
                wanted = (1, 1, count, 0, 1)[(row + step) % 5]
                chunks.append(SequenceChunk(tokens, done[row], tables[row], wanted))
                done[row] += count
        expected = plain.forward(chunks)
        torch.testing.assert_close(flash.forward(chunks), expected, atol=1e-4, rtol=1e-4)
    assert replays.captured == [8, 4, 2, 1]
    assert replays.replayed == [8, 4, 8]
    flash.copy_blocks([(tables[0][0], tables[1][0])])
    flash.clear_blocks([tables[2][0]])
    keys = flash._attention.cache.keys[0]
    assert torch.equal(keys[tables[0][0]], keys[tables[1][0]])
    assert not keys[tables[2][0]].any()


def test_filling_up_writes_only_into_the_spare_block(models: Models) -> None:
    _, flash, _ = models
    flash.forward([SequenceChunk((5,), 0, (row,), 1) for row in range(3)])
    keys = flash._attention.cache.keys[0]
    written = keys.flatten(1).any(1)
    assert written.nonzero().flatten().tolist() == [0, 1, 2, NUM_BLOCKS]


def test_only_short_chunks_within_a_size_run_in_graphs(models: Models) -> None:
    plain, flash, replays = models
    drafts = [SequenceChunk((1, 2), 0, (0,), 2)]
    prompt = SequenceChunk(range(40), 0, range(8, 13), 1)
    rows = [SequenceChunk((row,), 0, (row,), 1) for row in range(10)]
    for chunks, replayed in (
        (drafts, [2]),
        ([*drafts, prompt], [2]),
        (rows, [2]),
        (rows[:7], [2, 8]),
    ):
        expected = plain.forward(chunks)
        torch.testing.assert_close(flash.forward(chunks), expected, atol=1e-4, rtol=1e-4)
        assert replays.replayed == replayed


def test_a_capture_that_fails_leaves_the_larger_graphs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replays = Replays(smallest=4)
    _, flash, _ = with_graphs(tmp_path, "llama", replays, 8)
    assert "no CUDA graphs of 2 tokens and fewer: out of memory" in caplog.text
    flash.forward([SequenceChunk((1,), 0, (0,), 1)])
    assert (replays.captured, replays.replayed) == ([8, 4], [4])


def test_tokens_that_only_the_device_knows(models: Models) -> None:
    plain, flash, replays = models
    prompts = [
        SequenceChunk(range(20 + row), 0, range(8 * row, 8 * row + 8), 1) for row in range(3)
    ]
    known = [
        SequenceChunk((9 - row,), 20 + row, range(8 * row, 8 * row + 8), 1) for row in range(3)
    ]
    for model in (plain, flash):
        model.forward(prompts)
    expected = plain.forward(known).clone()
    drawn = torch.tensor([7, 9, -1, 8])
    for model in (plain, flash):
        model.feed(drawn)
        fed = [replace(c, tokens=(t,)) for c, t in zip(known, (-2, -4, -1), strict=True)]
        torch.testing.assert_close(model.forward(fed), expected, atol=1e-4, rtol=1e-4)
        # What is computed for a row without a distribution is dropped, but must not break the step.
        assert model.forward([replace(known[0], tokens=(-3,))]).isfinite().all()
    assert replays.replayed[-2:] == [4, 1]


def test_a_torch_without_the_kernel_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device, shapes = torch.device("cuda"), [LayerShape(4, 2, 64, 64)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert flash_fits(shapes, torch.bfloat16, device)
    assert not flash_fits(shapes, torch.float32, device)
    monkeypatch.setattr(flash, "_varlen_attn", lambda: lambda query, window_size: None)
    assert not flash_fits(shapes, torch.bfloat16, device)
    assert "torch before 2.12" in caplog.text
