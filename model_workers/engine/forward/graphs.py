"""CUDA graphs of decoding steps: hundreds of kernel launches become one.

A graph has fixed shapes and fixed addresses. So there is one per batch size of `SIZES`, captured when it is first
needed, with arrays of its own; a step is copied into the arrays of the next larger size, and the rows that only fill it
up write into a block of the cache that nobody reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from model_workers.engine.batch import Chunk
from model_workers.engine.forward.attention import Inputs
from model_workers.engine.forward.flash import FlashAttention, Layout, lay_out_decode

SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of the captured steps; larger steps run without a graph."""

Compute = Callable[[Inputs], Tensor]
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], Any], Tensor]]
"""Takes a computation; returns what repeats it, and where its result lies afterwards."""


@dataclass(frozen=True, slots=True)
class Captured:
    """One captured step: its arrays, what repeats it, and its logits."""

    layout: Layout
    replay: Callable[[], Any]
    logits: Tensor


class DecodeGraphs:
    """The graphs of one model. ``compute`` runs it on inputs whose layout the attention was told."""

    def __init__(
        self,
        attention: FlashAttention,
        compute: Compute,
        context_tokens: int,
        capture: Capture | None = None,
    ) -> None:
        self._attention = attention
        self._compute = compute
        self._width = -(-context_tokens // attention.pages.block_tokens)
        self._capture = capture or CudaCapture()
        self._captured: dict[int, Captured] = {}

    def run(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """Logits of a step, or None where it is not one of single tokens in a captured size."""
        if len(chunks) > SIZES[-1] or any(len(c.tokens) != 1 or c.logits != 1 for c in chunks):
            return None
        size = next(size for size in SIZES if size >= len(chunks))
        if size not in self._captured:
            self._captured[size] = self._captured_step(size)
        captured = self._captured[size]
        step = self._attention.upload(self._laid_out(chunks, size))
        captured.layout.wide.copy_(step.wide, non_blocking=True)
        captured.layout.narrow.copy_(step.narrow, non_blocking=True)
        captured.replay()
        return captured.logits[: len(chunks)]

    def _laid_out(self, chunks: Sequence[Chunk], size: int) -> Layout:
        pages = self._attention.pages
        return lay_out_decode(chunks, size, self._width, pages.block_tokens, pages.num_blocks)

    def _captured_step(self, size: int) -> Captured:
        layout = self._attention.upload(self._laid_out((), size))
        replay, logits = self._capture(lambda: self._compute(self._attention.use(layout)))
        return Captured(layout, replay, logits)


class CudaCapture:
    """Captures into CUDA graphs that share their memory: only one runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        """See `Capture`."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is set up at first use must not be captured
            for _ in range(2):
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = compute()
        self._pool = graph.pool()
        return graph.replay, logits
