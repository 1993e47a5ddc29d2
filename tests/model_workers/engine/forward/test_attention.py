"""Both ways of attending over pages hold against attention written out plainly."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from model_workers.engine.forward.attention import PagedAttention
from model_workers.engine.forward.kv_cache import KvCache, LayerShape
from model_workers.engine.paged_model import SequenceChunk

NUM_BLOCKS = 64
KEY_SIZE, VALUE_SIZE = 16, 8


class Rows:
    """Random queries, keys and values of some rows, and a cache with shuffled blocks to compute them on."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        heads: tuple[int, int] = (4, 2),
        window: int | None = None,
        block_tokens: int = 8,
        dtype: torch.dtype = torch.float32,
        softcap: float | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.shape = LayerShape(*heads, KEY_SIZE, VALUE_SIZE, window, softcap)
        pages = KvCache(
            [self.shape],
            num_blocks=NUM_BLOCKS,
            block_tokens=block_tokens,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        self.attention = PagedAttention(pages)
        sizes = ((heads[0], KEY_SIZE), (heads[1], KEY_SIZE), (heads[1], VALUE_SIZE))
        self.data = [tuple(torch.randn(n, *s).to(dtype) for s in sizes) for n in lengths]
        free = list(range(NUM_BLOCKS))
        random.Random(1).shuffle(free)
        self._plain: dict[int, Tensor] = {}
        self.blocks = [[free.pop() for _ in range(-(-n // block_tokens))] for n in lengths]

    def attend(self, parts: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """Computes (row, start, end) together; the answers come back in that order."""
        chunks = [
            SequenceChunk(range(start, end), start, self.blocks[row], 1)
            for row, start, end in parts
        ]
        inputs = self.attention.begin(chunks)
        order = sorted(range(len(parts)), key=lambda i: parts[i][2] - parts[i][1] > 16)
        packed = [
            torch.cat([self.data[parts[i][0]][kind][parts[i][1] : parts[i][2]] for i in order])
            for kind in range(3)
        ]
        answers = self.attention.attend(0, *packed, scaling=0.3)
        assert len(inputs.tokens) == len(answers)
        found = answers.split([parts[i][2] - parts[i][1] for i in order])
        return [found[order.index(i)] for i in range(len(parts))]

    def plain(self, row: int) -> Tensor:
        """Every answer of a row, written out; computed once, so after the last change of `data`."""
        if row not in self._plain:
            self._plain[row] = self._written_out(row)
        return self._plain[row]

    def _written_out(self, row: int) -> Tensor:
        query, key, value = (part.double() for part in self.data[row])
        group = self.shape.heads // self.shape.kv_heads
        key, value = (part.repeat_interleave(group, 1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * 0.3
        if self.shape.softcap is not None:
            scores = torch.tanh(scores / self.shape.softcap) * self.shape.softcap
        place = torch.arange(len(query))
        hidden = place > place[:, None]
        if self.shape.window is not None:
            hidden |= place <= place[:, None] - self.shape.window
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", shares, value)


CASES = (
    {},
    {"heads": (4, 1)},
    {"heads": (3, 3)},
    {"window": 1},
    {"window": 11},
    {"softcap": 2.0},
    {"block_tokens": 1},
    {"block_tokens": 32},
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("sizes", [(1,), (5, 1, 16), (17, 1, 150), (40,)], ids=str)
def test_holds_against_plain_attention(case: dict[str, object], sizes: tuple[int, ...]) -> None:
    lengths = (1, 30, 57, 150) if case.get("block_tokens") != 1 else (1, 20, 40)
    rows = Rows(lengths, **case)  # type: ignore[arg-type]
    done = [0] * len(lengths)
    turn = 0
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        parts = []
        for row, length in enumerate(lengths):
            count = min(sizes[(turn + row) % len(sizes)], length - done[row])
            if count:
                parts.append((row, done[row], done[row] + count))
                done[row] += count
        turn += 1
        for (row, start, end), found in zip(parts, rows.attend(parts), strict=True):
            torch.testing.assert_close(
                found.double(), rows.plain(row)[start:end], atol=1e-5, rtol=1e-5
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_bit_exact_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    lengths = (3, 31, 32, 33, 64, 120)
    rows = Rows(lengths, dtype=dtype, block_tokens=16)
    for row, length in enumerate(lengths):
        rows.attend([(row, 0, length - 1)]) if length > 1 else None
    together = rows.attend([(row, length - 1, length) for row, length in enumerate(lengths)])
    for row, length in enumerate(lengths):
        alone = rows.attend([(row, length - 1, length)])[0]
        assert torch.equal(alone, together[row])


def test_drafts_are_answered_as_single_tokens_to_the_last_bit() -> None:
    rows = Rows((40,), block_tokens=16)
    rows.attend([(0, 0, 30)])
    single = [rows.attend([(0, place, place + 1)])[0] for place in range(30, 36)]
    assert torch.equal(rows.attend([(0, 30, 36)])[0], torch.cat(single))


def test_index_arrays_are_kept_until_a_row_gets_another_block() -> None:
    rows = Rows((20, 20))
    rows.attend([(0, 0, 12), (1, 0, 12)])
    made = []
    for place in range(12, 20):
        for row, found in enumerate(rows.attend([(row, place, place + 1) for row in range(2)])):
            expected = rows.plain(row)[place]
            torch.testing.assert_close(found[0].double(), expected, atol=1e-5, rtol=1e-5)
        made.append(rows.attention._decode[0])
    assert [one is made[0] for one in made] == [True] * 4 + [False] * 4
    assert made[4] is made[7]


def test_a_shared_block_serves_two_rows() -> None:
    rows = Rows((24, 24))
    shared = [tuple(part[:16] for part in rows.data[0])]
    for kind in range(3):
        rows.data[1][kind][:16] = shared[0][kind]
    rows.blocks[1][:2] = rows.blocks[0][:2]
    rows.attend([(0, 0, 24)])
    found = rows.attend([(1, 16, 24)])[0]
    torch.testing.assert_close(found.double(), rows.plain(1)[16:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 20])
def test_what_another_row_left_in_a_block_is_not_seen(count: int) -> None:
    rows = Rows((30,))
    for pages in rows.attention.cache.of(0):
        pages.fill_(1e4)
    rows.attend([(0, 0, 30 - count)])
    found = rows.attend([(0, 30 - count, 30)])[0]
    torch.testing.assert_close(found.double(), rows.plain(0)[30 - count :], atol=1e-5, rtol=1e-5)
