"""Attention over the paged cache on CUDA, by the flash kernel that torch has for block tables.

What the kernel asks for (torch 2.13; `flash_fits` checks it): pages [blocks, block tokens, kv heads, size] with a
multiple of 256 tokens, half precision, head sizes up to 256 in steps of 8, no cap on scores. Keys of a row are never
split between thread blocks: with the automatic split the kernel gives NaN now and then over block tables
(github.com/pytorch/torchtitan/issues/3235), and without it a row's numbers do not depend on the other rows.

A step's index arrays are made on the host and go over in two copies from pinned memory, without waiting for the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from model_workers.engine.batch import Chunk
from model_workers.engine.forward.attention import Inputs
from model_workers.engine.forward.pages import LayerShape, Pages
from model_workers.engine.forward.step import Ints, pack

PAGE_TOKENS: Final = 256
"""The kernel takes blocks of multiples of this."""


def flash_fits(shapes: Sequence[LayerShape], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel computes such layers here."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    if not {"block_table", "num_splits"} <= set(signature(varlen_attn).parameters):
        return False
    return dtype in (torch.bfloat16, torch.float16) and all(
        s.key_size == s.value_size
        and s.key_size <= 256
        and s.key_size % 8 == 0
        and s.softcap is None
        for s in shapes
    )


class FlashPages(Pages):
    """Keys and values [blocks, block tokens, kv heads, size]; one block more than told, for rows that only fill up."""

    def write_slots(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores tokens, key and value [tokens, kv heads, size]; a slot is block x block tokens + offset."""
        for page, new in zip(self.of(layer), (key, value), strict=True):
            page.view(-1, *page.shape[2:]).index_copy_(0, slots, new)

    def _keys(self, shape: LayerShape) -> Tensor:
        return self._zeros(self.num_blocks + 1, self.block_tokens, shape.kv_heads, shape.key_size)

    def _values(self, shape: LayerShape) -> Tensor:
        return self._zeros(self.num_blocks + 1, self.block_tokens, shape.kv_heads, shape.value_size)


@dataclass(frozen=True, slots=True)
class Layout:
    """One step as the kernel wants it, on the host (`Ints`) or on the device (`Tensor`).

    Attributes:
        wide: tokens, positions, slots, wanted, one behind the other, 64 bits.
        narrow: ends of queries and of keys (each from 0), keys of each row, block tables; 32 bits.
        tokens, wanted, rows: how many.
        longest_query, longest_keys: of a row.
    """

    wide: Any
    narrow: Any
    tokens: int
    wanted: int
    rows: int
    longest_query: int
    longest_keys: int

    def inputs(self) -> Inputs:
        """The model's part."""
        tokens, positions, _, wanted = self._wide()
        return Inputs(tokens, positions, wanted)

    def slots(self) -> Tensor:
        """Where keys and values go."""
        return self._wide()[2]

    def rows_of_keys(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ends of queries, ends of keys, keys of each row, block tables."""
        ends = self.rows + 1
        queries, keys, lengths, table = self.narrow.split(
            [ends, ends, self.rows, len(self.narrow) - 2 * ends - self.rows]
        )
        return queries, keys, lengths, table.view(self.rows, -1)

    def _wide(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        parts: tuple[Tensor, Tensor, Tensor, Tensor] = self.wide.split(
            [self.tokens, self.tokens, self.tokens, self.wanted]
        )
        return parts


def lay_out(chunks: Sequence[Chunk], block_tokens: int) -> Layout:
    """The arrays of a step, on the host."""
    step = pack(chunks, block_tokens)
    spans = (*step.short, *step.long)
    queries = np.array([span.count for span in spans])
    keys = np.array([span.start + span.count for span in spans])
    width = -(-int(keys.max()) // block_tokens)
    table = np.zeros((len(spans), width), dtype=np.int32)
    for row, span in enumerate(spans):
        seen = span.blocks[: -(-int(keys[row]) // block_tokens)]
        table[row, : len(seen)] = seen
    slots = step.blocks * block_tokens + step.offsets
    return Layout(
        wide=np.concatenate((step.tokens, step.positions, slots, step.wanted)),
        narrow=_narrow(queries, keys, table),
        tokens=len(step.tokens),
        wanted=len(step.wanted),
        rows=len(spans),
        longest_query=int(queries.max()),
        longest_keys=int(keys.max()),
    )


def lay_out_decode(
    chunks: Sequence[Chunk], rows: int, width: int, block_tokens: int, spare: int
) -> Layout:
    """The arrays of a step of single tokens, filled up to ``rows`` rows and tables of ``width`` blocks.

    Rows that only fill up see one token, in the block ``spare``.
    """
    wide = np.zeros((4, rows), dtype=np.int64)
    wide[2] = spare * block_tokens
    wide[3] = np.arange(rows)
    table = np.full((rows, width), spare, dtype=np.int32)
    for row, chunk in enumerate(chunks):
        block, offset = divmod(chunk.start, block_tokens)
        wide[:3, row] = chunk.tokens[0], chunk.start, chunk.blocks[block] * block_tokens + offset
        table[row, : block + 1] = chunk.blocks[: block + 1]
    return Layout(
        wide=wide.ravel(),
        narrow=_narrow(np.ones(rows, dtype=np.int64), wide[1] + 1, table),
        tokens=rows,
        wanted=rows,
        rows=rows,
        longest_query=1,
        longest_keys=width * block_tokens,
    )


class FlashAttention:
    """See `Attention`. ``kernel`` is `varlen_attn`."""

    def __init__(self, pages: FlashPages, kernel: Callable[..., Any] = varlen_attn) -> None:
        self.pages = pages
        self._kernel = kernel

    def begin(self, chunks: Sequence[Chunk]) -> Inputs:
        """See `Attention.begin`."""
        return self.use(self.upload(lay_out(chunks, self.pages.block_tokens)))

    def use(self, layout: Layout) -> Inputs:
        """Starts a step whose arrays are on the device already."""
        self._layout = layout
        self._slots = layout.slots()
        self._rows = layout.rows_of_keys()
        return layout.inputs()

    def upload(self, layout: Layout) -> Layout:
        """The same on the device."""
        return Layout(
            self.sent(layout.wide),
            self.sent(layout.narrow),
            layout.tokens,
            layout.wanted,
            layout.rows,
            layout.longest_query,
            layout.longest_keys,
        )

    def sent(self, values: Any) -> Tensor:
        """Host values on the device, copied without waiting for it."""
        host = torch.from_numpy(values)
        if self.pages.device.type == "cuda":
            host = host.pin_memory()
        return host.to(self.pages.device, non_blocking=True)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float
    ) -> Tensor:
        """See `Attention.attend`."""
        self.pages.write_slots(layer, self._slots, key, value)
        keys, values = self.pages.of(layer)
        window = self.pages.shapes[layer].window
        query_ends, key_ends, lengths, table = self._rows
        answers: Tensor = self._kernel(
            query,
            keys,
            values,
            query_ends,
            key_ends,
            self._layout.longest_query,
            self._layout.longest_keys,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=True,
            seqused_k=lengths,
            block_table=table,
            num_splits=1,
        )
        return answers


def _narrow(queries: Ints, keys: Ints, table: Any) -> Any:
    ends = (np.append(0, np.cumsum(counts)) for counts in (queries, keys))
    return np.concatenate((*ends, keys, table.ravel())).astype(np.int32)
