"""Continuous batching over any decoder-only model of transformers, through the model's own forward.

A step is at most two forward passes: one token for every row that decodes, then prefill (prompt and produced tokens)
for rows that join, bounded so that decoding rows do not wait long. A prompt over the bound is cut into pieces of one
step each.

Rows that decode sit in the first slots of the cache without a hole, in the order of ``_active``. A row whose prompt is
only partly done (``_partial``) sits in the slot behind them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from model_workers.engine.protocol import Load, RowEnd, RowInvalid, RowSpec, RowStep
from model_workers.engine.rows import Row, RowState
from model_workers.engine.sampler import Draw, Drawn, sample
from model_workers.engine.slot_cache import SlotCache
from model_workers.engine.slot_forward import Forward
from model_workers.engine.table import RowTable

PREFILL_TOKENS: Final = 512
"""Most prompt tokens in one step, padding included."""

BROKEN: Final = "the model's output is not a number"


@dataclass(eq=False)
class Active:
    """A row in a slot.

    Attributes:
        cached: tokens whose keys and values are in the slot.
        seen: which tokens occurred, kept when there is a repetition penalty.
    """

    row: Row
    cached: int = 0
    seen: Tensor | None = None
    broken: bool = False

    def context(self) -> list[int]:
        """Prompt and answer."""
        return [*self.row.spec.prompt, *self.row.tokens]

    def draw(self) -> Draw:
        """What is to be drawn for it now."""
        return Draw(self.row.spec.sampling, len(self.row.tokens), self.seen)


class TransformersEngine:
    """See `Engine`. ``model`` is a causal language model in evaluation mode."""

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        max_waiting: int,
        context_tokens: int,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        self._table = RowTable(slots, max_waiting, context_tokens)
        self._cache = SlotCache(slots, context_tokens)
        self._forward = Forward(model, self._cache)
        self._prefill_tokens = prefill_tokens
        self._active: list[Active] = []
        self._partial: Active | None = None

    def add(self, row: RowSpec, now: float) -> None:
        """See `Engine.add`."""
        highest = max((*row.prompt, *row.produced), default=0)
        vocabulary = self._forward.vocabulary
        if highest >= vocabulary:
            raise RowInvalid(f"token {highest} is not one of the model's {vocabulary}")
        self._table.add(row)

    def cancel(self, request_ids: Collection[str]) -> None:
        """See `Engine.cancel`."""
        self._table.cancel(request_ids)

    @torch.inference_mode()
    def step(self, now: float) -> list[RowStep]:
        """See `Engine.step`."""
        swept = self._table.sweep(now)
        steps = [row.closing(end) for row, end in swept if not row.replaced]
        self._compact()
        steps += self._decode()
        self._compact()
        steps += self._prefill()
        self._compact()
        self._table.steps += 1
        if not self._active and self._partial is None:
            self._cache.release()
        return steps

    def abort(self, message: str) -> list[RowStep]:
        """See `Engine.abort`."""
        self._active, self._partial = [], None
        self._cache.release()
        return [row.closing(RowEnd.FAILED, message) for row in self._table.drain()]

    def load(self) -> Load:
        """See `Engine.load`."""
        return self._table.load()

    def cache_bytes(self) -> int:
        """Memory that keys and values take now, bytes."""
        return self._cache.size_bytes()

    def _decode(self) -> list[RowStep]:
        if not self._active:
            return []
        tokens = [active.row.tokens[-1] for active in self._active]
        logits = self._forward.decode(tokens, [active.cached for active in self._active])
        for active in self._active:
            active.cached += 1
        return self._take(self._active, logits)

    def _prefill(self) -> list[RowStep]:
        joining = self._join() if self._partial is None else [self._partial]
        self._partial = None
        if not joining:
            return []
        contexts = [active.context() for active in joining]
        start = joining[0].cached
        end = min(max(map(len, contexts)), start + self._prefill_tokens)
        logits = self._forward.prefill(len(self._active), contexts, start, end)
        for active, context in zip(joining, contexts, strict=True):
            active.cached = min(len(context), end)
        if end < len(contexts[0]):
            self._partial = joining[0]
            return []
        self._active += joining
        for active in joining:
            active.row.move(RowState.DECODE)
        return self._take(joining, logits)

    def _join(self) -> list[Active]:
        """Rows whose padded prompts fit into one pass; or one row alone, however long."""
        joining: list[Active] = []
        longest = 0
        while (length := self._table.next_length()) is not None:
            longest = max(longest, length)
            if joining and longest * (len(joining) + 1) > self._prefill_tokens:
                break
            row = self._table.join()
            assert row is not None
            joining.append(self._activated(row))
        return joining

    def _activated(self, row: Row) -> Active:
        active = Active(row)
        if row.spec.sampling.repetition_penalty != 1:
            active.seen = self._forward.seen(active.context())
        return active

    def _take(self, rows: Sequence[Active], logits: Tensor) -> list[RowStep]:
        drawn = sample(logits, [active.draw() for active in rows])
        return [self._taken(active, token) for active, token in zip(rows, drawn, strict=True)]

    def _taken(self, active: Active, drawn: Drawn | None) -> RowStep:
        if drawn is None:
            active.broken = True
            self._table.end(active.row)
            return active.row.closing(RowEnd.FAILED, BROKEN)
        step = active.row.take(drawn.token_id, drawn.logprobs)
        if active.seen is not None:
            active.seen[drawn.token_id] = True
        if step.end is not None:
            self._table.end(active.row)
        return step

    def _compact(self) -> None:
        """Takes ended rows out of their slots, and closes the holes."""
        if self._partial is not None and self._partial.row.state is RowState.ENDED:
            self._partial = None
        for slot in reversed(range(len(self._active))):
            if self._active[slot].row.state is RowState.ENDED:
                self._leave(slot)

    def _leave(self, slot: int) -> None:
        if self._active[slot].broken:
            self._cache.scrub(slot)
        last = self._active.pop()
        end = len(self._active)
        if slot != end:
            self._cache.move(end, slot, last.cached)
            self._active[slot] = last
        if self._partial is not None:
            self._cache.move(end + 1, end, self._partial.cached)
