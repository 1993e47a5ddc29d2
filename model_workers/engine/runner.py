"""Runs the chunks of a step, and finds out which of them break it."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from model_workers.engine.batch import Chunk, PagedModel

log = logging.getLogger(__name__)


class Runner:
    """Owns a paged model. A step that raises is computed again in halves, until the chunks that break it are alone."""

    def __init__(self, model: PagedModel) -> None:
        self.model = model

    def forward(self, chunks: Sequence[Chunk]) -> tuple[Tensor, dict[int, str]]:
        """See `PagedModel.forward`.

        Returns:
            Logits of the chunks that could be computed, in their order; and by place those that could not, with one
            sentence each.
        """
        try:
            return self.model.forward(chunks), {}
        except Exception as error:
            # Whatever it is, the other rows must not pay for it. Computing a chunk twice writes the same again.
            log.exception("a step of %d chunks failed", len(chunks))
            return self._recovered(chunks, error)

    def _recovered(
        self, chunks: Sequence[Chunk], error: Exception
    ) -> tuple[Tensor, dict[int, str]]:
        torch.cuda.empty_cache()
        if len(chunks) == 1:
            return torch.empty(0, self.model.vocab_size), {0: _sentence(error)}
        return self._in_halves(chunks)

    def _in_halves(self, chunks: Sequence[Chunk]) -> tuple[Tensor, dict[int, str]]:
        middle = len(chunks) // 2
        first, broken = self._half(chunks[:middle])
        first = first.clone()  # valid until the next call only
        second, more = self._half(chunks[middle:])
        broken |= {middle + place: sentence for place, sentence in more.items()}
        parts = [part for part in (first, second) if len(part)]
        return torch.cat(parts) if parts else first, broken

    def _half(self, chunks: Sequence[Chunk]) -> tuple[Tensor, dict[int, str]]:
        try:
            return self.model.forward(chunks), {}
        except Exception as error:  # as above, and told there
            return self._recovered(chunks, error)


def _sentence(error: Exception) -> str:
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "memory" in str(error):
        return "the worker has not enough memory to compute this row"
    return f"the model failed on this row: {type(error).__name__}"
