"""Attention over the paged cache on CUDA, by torch's flash kernel with block tables; and CUDA graphs.

Requirements of the kernel (torch from 2.12 on; `flash_fits`): a cache [blocks, block tokens, kv heads, size] with a
multiple of 256 tokens, half precision, head sizes up to 256 in steps of 8, no cap on scores. Keys of a row are never
split between thread blocks: with the automatic split the kernel sometimes returns NaN over block tables
(github.com/pytorch/torchtitan/issues/3235), and without it a row's numbers do not depend on the other rows.

A step's index arrays are made on the host and copied in two transfers from pinned memory, without waiting for the
device.

CUDA graphs turn the hundreds of kernels of a decoding step into one launch. A graph has fixed shapes and addresses. So
there is one for each number of tokens in `SIZES`, captured at start with its own arrays; a step is copied into the
arrays of the next larger size, and padding rows write into a block of the cache that is never read.

In a graph every token is a row that sees the keys up to its position: keys and values of all tokens are written before
attention reads them, so that the tokens of one chunk can share a step. That is how drafted tokens are verified in the
graphs of decoding. A step with a chunk of more than `SHORT_TOKENS`, whose kernels are long, runs without a graph.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from model_workers.engine.devices import on_device
from model_workers.engine.forward.attention import ModelInputs
from model_workers.engine.forward.kv_cache import KvCache, LayerShape
from model_workers.engine.forward.packing import SHORT_TOKENS, Ints, pack
from model_workers.engine.paged_model import SequenceChunk

FLASH_BLOCK_TOKENS: Final = 256
"""Block sizes of the kernel are multiples of this."""

SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of tokens of captured steps; larger steps run without a graph."""

Compute = Callable[[ModelInputs], Tensor]
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], Any], Tensor]]
"""Records a computation; returns a function that repeats it, and its result."""

logger = logging.getLogger(__name__)


def flash_fits(shapes: Sequence[LayerShape], dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the kernel can compute such layers here."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    fits = dtype in (torch.bfloat16, torch.float16) and all(
        s.key_size == s.value_size
        and s.key_size <= 256
        and s.key_size % 8 == 0
        and s.softcap is None
        for s in shapes
    )
    if fits and not {"block_table", "num_splits"} <= set(signature(_varlen_attn()).parameters):
        logger.warning(
            "torch before 2.12 has no kernel for block tables: attention is slower, and there are no CUDA graphs"
        )
        return False
    return fits


def _varlen_attn() -> Callable[..., Any]:
    """Import and return the kernel; with it comes torch's compiler, whose import takes longer than that of torch."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


class FlashKvCache(KvCache):
    """Keys and values [blocks, block tokens, kv heads, size], with one spare block for padding rows."""

    def write_slots(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store keys and values [tokens, kv heads, size]; a slot is block x block tokens + offset."""
        for table, new in zip(self.of(layer), (key, value), strict=True):
            table.view(-1, *table.shape[2:]).index_copy_(0, slots, new)

    def _keys(self, shape: LayerShape) -> Tensor:
        return self._zeros(self.num_blocks + 1, self.block_tokens, shape.kv_heads, shape.key_size)

    def _values(self, shape: LayerShape) -> Tensor:
        return self._zeros(self.num_blocks + 1, self.block_tokens, shape.kv_heads, shape.value_size)


@dataclass(frozen=True, slots=True)
class FlashLayout:
    """The arrays of a step for the kernel, on the host (`Ints`) or on the device (`Tensor`).

    Attributes:
        wide: Tokens, positions, slots and logits indices, one after the other, 64 bits.
        narrow: Ends of queries and of keys (each from 0), keys of each row, block tables; 32 bits.
        tokens, logits_count, rows: Their numbers.
        longest_query, longest_keys: Maximum of a row.
    """

    wide: Any
    narrow: Any
    tokens: int
    logits_count: int
    rows: int
    longest_query: int
    longest_keys: int

    def inputs(self) -> ModelInputs:
        """Return the model's inputs."""
        tokens, positions, _, logits_indices = self._wide()
        return ModelInputs(tokens, positions, logits_indices)

    def slots(self) -> Tensor:
        """Return where keys and values are written."""
        return self._wide()[2]

    def rows_of_keys(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ends of queries, ends of keys, keys of each row, block tables."""
        ends = self.rows + 1
        queries, keys, lengths, table = self.narrow.split(
            [ends, ends, self.rows, len(self.narrow) - 2 * ends - self.rows]
        )
        return queries, keys, lengths, table.view(self.rows, -1)

    def _wide(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        parts: tuple[Tensor, Tensor, Tensor, Tensor] = self.wide.split(
            [self.tokens, self.tokens, self.tokens, self.logits_count]
        )
        return parts


def lay_out(chunks: Sequence[SequenceChunk], block_tokens: int) -> FlashLayout:
    """Return the arrays of a step, on the host."""
    step = pack(chunks, block_tokens)
    places = (*step.short, *step.long)
    queries = np.array([place.count for place in places])
    keys = np.array([place.start + place.count for place in places])
    width = -(-int(keys.max()) // block_tokens)
    table = np.zeros((len(places), width), dtype=np.int32)
    for row, place in enumerate(places):
        table[row, : len(place.blocks)] = place.blocks
    slots = step.blocks * block_tokens + step.offsets
    return FlashLayout(
        wide=np.concatenate((step.tokens, step.positions, slots, step.logits_indices)),
        narrow=_narrow(queries, keys, table),
        tokens=len(step.tokens),
        logits_count=len(step.logits_indices),
        rows=len(places),
        longest_query=int(queries.max()),
        longest_keys=int(keys.max()),
    )


def lay_out_decode(
    chunks: Sequence[SequenceChunk], rows: int, width: int, block_tokens: int, spare: int
) -> FlashLayout:
    """Return the arrays of a step whose every token is a row, padded to `rows` rows and tables of `width` blocks.

    Padding rows see one token, in the block `spare`.
    """
    wide = np.zeros((4, rows), dtype=np.int64)
    wide[2] = spare * block_tokens
    wide[3] = np.arange(rows)
    table = np.full((rows, width), spare, dtype=np.int32)
    row = 0
    for chunk in chunks:
        for position, token in enumerate(chunk.tokens, chunk.start):
            block, offset = divmod(position, block_tokens)
            wide[:3, row] = token, position, chunk.blocks[block] * block_tokens + offset
            table[row, : block + 1] = chunk.blocks[: block + 1]
            row += 1
    return FlashLayout(
        wide=wide.ravel(),
        narrow=_narrow(np.ones(rows, dtype=np.int64), wide[1] + 1, table),
        tokens=rows,
        logits_count=rows,
        rows=rows,
        longest_query=1,
        longest_keys=width * block_tokens,
    )


class FlashAttention:
    """Attention by the flash kernel; see `Attention`. `kernel` defaults to `varlen_attn`."""

    def __init__(self, cache: FlashKvCache, kernel: Callable[..., Any] | None = None) -> None:
        self.cache = cache
        self._kernel = kernel or _varlen_attn()

    def begin(self, chunks: Sequence[SequenceChunk]) -> ModelInputs:
        """Begin a step; see `Attention.begin`."""
        return self.use(self.upload(lay_out(chunks, self.cache.block_tokens)))

    def use(self, layout: FlashLayout) -> ModelInputs:
        """Begin a step whose arrays are on the device already."""
        self._layout = layout
        self._slots = layout.slots()
        self._rows = layout.rows_of_keys()
        return layout.inputs()

    def upload(self, layout: FlashLayout) -> FlashLayout:
        """Copy the arrays to the device."""
        wide, narrow = (on_device(part, self.cache.device) for part in (layout.wide, layout.narrow))
        return replace(layout, wide=wide, narrow=narrow)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float
    ) -> Tensor:
        """Compute attention of one layer; see `Attention.attend`."""
        self.cache.write_slots(layer, self._slots, key, value)
        keys, values = self.cache.of(layer)
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
            window_size=self._window(self.cache.shapes[layer].window),
            enable_gqa=True,
            seqused_k=lengths,
            block_table=table,
            num_splits=1,
        )
        return answers

    def _window(self, window: int | None) -> tuple[int, int]:
        """Return how far back and ahead a query looks; -1: without a bound."""
        if window is not None:
            return window - 1, 0
        # Single queries see all keys anyway; only without any bound the kernel computes the heads of a group together.
        return (-1, -1) if self._layout.longest_query == 1 else (-1, 0)


def _narrow(queries: Ints, keys: Ints, table: Any) -> Any:
    ends = (np.append(0, np.cumsum(counts)) for counts in (queries, keys))
    return np.concatenate((*ends, keys, table.ravel())).astype(np.int32)


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A captured step: its arrays, a function that repeats it, and its logits."""

    layout: FlashLayout
    replay: Callable[[], Any]
    logits: Tensor


class DecodeGraphs:
    """The graphs of one model. `compute` runs it on inputs of the attention's current layout."""

    def __init__(
        self,
        attention: FlashAttention,
        compute: Compute,
        context_tokens: int,
        capture: Capture | None = None,
    ) -> None:
        self._attention = attention
        self._compute = compute
        self._width = -(-context_tokens // attention.cache.block_tokens)
        self._capture = capture or CudaCapture(attention.cache.device)
        self._captured: dict[int, CapturedStep] = {}
        self._sizes: list[int] = []

    def capture(self, tokens: int) -> None:
        """Capture steps of up to `tokens` tokens, the largest first, because smaller ones reuse its memory.

        What cannot be captured runs in the next larger graph, or without one.
        """
        for size in reversed(SIZES[: bisect_left(SIZES, tokens) + 1] if tokens else ()):
            try:
                self._captured[size] = self._captured_step(size)
            except RuntimeError as error:
                logger.warning("no CUDA graphs of %d tokens and fewer: %s", size, error)
                break
        self._sizes = sorted(self._captured)

    def run(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        """Return the logits of a step, in the order of the chunks."""
        tokens = sum(len(chunk.tokens) for chunk in chunks)
        longest = max(len(chunk.tokens) for chunk in chunks)
        if longest <= SHORT_TOKENS and self._sizes and tokens <= self._sizes[-1]:
            return self._replayed(chunks, tokens)
        return self._compute(self._attention.begin(chunks))

    def _replayed(self, chunks: Sequence[SequenceChunk], tokens: int) -> Tensor:
        captured = self._captured[self._sizes[bisect_left(self._sizes, tokens)]]
        step = self._attention.upload(self._laid_out(chunks, captured.layout.rows))
        captured.layout.wide.copy_(step.wide, non_blocking=True)
        captured.layout.narrow.copy_(step.narrow, non_blocking=True)
        captured.replay()
        logits_count = sum(chunk.logits for chunk in chunks)
        if logits_count in (0, tokens):
            return captured.logits[:logits_count]
        indices = pack(chunks, self._attention.cache.block_tokens).logits_indices
        return captured.logits.index_select(0, on_device(indices, captured.logits.device))

    def _laid_out(self, chunks: Sequence[SequenceChunk], size: int) -> FlashLayout:
        cache = self._attention.cache
        return lay_out_decode(chunks, size, self._width, cache.block_tokens, cache.num_blocks)

    def _captured_step(self, size: int) -> CapturedStep:
        layout = self._attention.upload(self._laid_out((), size))
        replay, logits = self._capture(lambda: self._compute(self._attention.use(layout)))
        return CapturedStep(layout, replay, logits)


class CudaCapture:
    """Captures into CUDA graphs that share their memory: only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        """Record the graph of a step; a `Capture`."""
        # Streams belong to the current device, which is the first one if nobody says otherwise.
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # first-time set-up must not be captured
                for _ in range(2):
                    compute()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                logits = compute()
        self._pool = graph.pool()
        return graph.replay, logits
