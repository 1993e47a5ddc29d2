"""The engine that computes whole padded batches through transformers' `generate()`.

Rows wait until no batch runs. Then the most urgent one begins the next batch:

1. Rows that came in one batch of the batcher go together: its policy chose them.
2. Others that wait join them where they are about as long, so that they add little padding.
3. A batch holds `slots` rows at most, and no more cells of the KV cache than `slots` rows of the context have.

Nothing joins a batch that runs. A step computes one token of each of its rows.
"""

import bisect
import logging
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import Final

import torch
from typing_extensions import override

from model_workers.engine.generate.model import GenerateModel
from model_workers.engine.generate.run import BatchRun
from model_workers.engine.protocol import Engine, RowEnd, RowInvalid, RowSpec, RowStep, RowTooLong
from model_workers.engine.rows import RequestIndex, Row, RowLimits, RowState
from model_workers.engine.sampling.sampler import Sampler
from model_workers.engine.sampling.state import SamplingState
from sluice.internal.v1 import worker_pb2
from sluice.settings.models import SideLimits

log = logging.getLogger(__name__)

JOIN_SHARE: Final = 0.8
"""Least length of a row that joins another batch, as a share of that batch's longest row."""


class GenerateEngine(Engine):
    """See `Engine` and the module."""

    def __init__(
        self,
        model: GenerateModel,
        sampler: Sampler,
        limits: RowLimits,
        sides: SideLimits | None = None,
    ) -> None:
        """``sides``: the limits of an encoder-decoder."""
        self.sampler = sampler
        self._model = model
        self._limits = limits
        self._sides = sides
        self._rows = RequestIndex(limits)
        self._waiting: list[Row] = []
        self._split: deque[list[Row]] = deque()
        """Parts of a batch that could not be computed as a whole; they go first."""
        self._run: BatchRun | None = None
        self._ends: list[RowStep] = []
        """Of the current step; kept where it raises."""
        self._has_computed = False
        """Whether rows of the present batch got tokens, before it was split too."""
        self._steps = 0

    @override
    def add(self, row: RowSpec, now: float) -> None:
        if row.values is not None:
            raise RowInvalid("this model gives answers, and no embeddings or scores")
        if row.audio is not None:
            raise RowInvalid("this model takes text and no audio")
        self._model.check(row)
        row = self._limited(row)
        sampling = self._open(row)
        added, replaced = self._rows.add(row)
        if replaced is not None:
            self._leave(replaced)
        added.sampling = sampling
        bisect.insort(self._waiting, added, key=lambda other: other.urgency)

    def _limited(self, row: RowSpec) -> RowSpec:
        """Keep both sides of an encoder-decoder within its limits."""
        if self._sides is None:
            return row
        if len(row.prompt) > self._sides.prompt:
            raise RowTooLong(
                f"the prompt has {len(row.prompt)} tokens; the encoder reads {self._sides.prompt}"
            )
        most = min(row.sampling.max_tokens, self._sides.answer - len(self._model.prefix))
        return replace(row, sampling=replace(row.sampling, max_tokens=most))

    def _open(self, row: RowSpec) -> SamplingState:
        # Penalties of an encoder-decoder are about what its decoder has said, as in transformers.
        return self.sampler.open(row if self._sides is None else replace(row, prompt=()))

    @override
    def cancel(self, request_ids: Collection[str]) -> None:
        self._rows.cancel(request_ids)

    @override
    def step(self, now: float) -> list[RowStep]:
        self._steps += 1
        for row, end in self._rows.due(now):
            self._leave(row)
            self._ends.append(row.end_step(end))
        if self._run is None and self._rows:
            self._run = BatchRun(self._model, self.sampler, self._next_batch())
        steps = [] if self._run is None else self._advance(self._run)
        ends, self._ends = self._ends, []
        return ends + steps

    def _advance(self, run: BatchRun) -> list[RowStep]:
        """Compute a token of each row of the batch."""
        try:
            taken = run.advance()
        except Exception as error:
            self._run = None
            return self._split_up(list(run.live.values()), error)
        self._has_computed = True
        for row, step in taken:
            if step.end is not None:
                self._leave(row)
        return [step for _, step in taken]

    def _split_up(self, rows: list[Row], error: Exception) -> list[RowStep]:
        """Put a batch that failed back in halves, so that only the row that breaks it fails; returns its end.

        Raises:
            Exception: ``error``, where a row fails alone and nothing of its batch was computed: it may be the worker.
        """
        if len(rows) > 1:
            log.warning("split a batch of %d rows in two: %r", len(rows), error)
            for row in rows:
                row.move(RowState.PREEMPTED)
                row.sampling = self._open(replace(row.spec, produced=row.answer))
            half = len(rows) // 2
            self._split += [rows[:half], rows[half:]]
            return []
        (row,) = rows
        if not self._has_computed:
            raise error
        log.warning("request %s failed: %r", row.spec.request_id, error)
        self._leave(row)
        end = RowEnd.RETURNED if isinstance(error, torch.OutOfMemoryError) else RowEnd.FAILED
        return [row.end_step(end, f"the engine failed: {type(error).__name__}")]

    def _next_batch(self) -> list[Row]:
        batch = self._split.popleft() if self._split else self._form()
        for row in batch:
            row.move(RowState.RUNNING)
        return batch

    def _form(self) -> list[Row]:
        """Take the rows of the next batch from those that wait; see the module."""
        self._has_computed = False
        first = self._waiting[0]
        group, name = self._model.group(first), first.spec.batch
        able = [row for row in self._waiting if self._model.group(row) == group]
        batch: list[Row] = []
        for row in (row for row in able if row.spec.batch == name):
            if self._fits([*batch, row]):
                batch.append(row)
        longest = max(len(row.tokens) for row in batch)
        for row in able:
            is_alike = JOIN_SHARE * longest <= len(row.tokens) <= longest
            if is_alike and row.spec.batch != name and self._fits([*batch, row]):
                batch.append(row)
        for row in batch:
            self._waiting.remove(row)
        return batch

    def _fits(self, batch: list[Row]) -> bool:
        columns = max(len(row.tokens) for row in batch) + max(row.room for row in batch)
        cells = self._limits.slots * self._limits.context_tokens
        return len(batch) <= self._limits.slots and (
            len(batch) == 1 or len(batch) * columns <= cells
        )

    def _leave(self, row: Row) -> None:
        """Take a row out, wherever it is."""
        for rows in (self._waiting, *self._split):
            if row in rows:
                rows.remove(row)
        self._split = deque(rows for rows in self._split if rows)
        row.move(RowState.ENDED)
        self._rows.remove(row)
        if self._run is not None:
            self._run.drop(row)
            if not self._run.live:
                self._run.stop()
                self._run = None

    @override
    def abort(self, message: str) -> list[RowStep]:
        ends, self._ends = self._ends, []
        for row in list(self._rows):
            self._leave(row)
            ends.append(row.end_step(RowEnd.RETURNED, message))
        return ends

    @override
    def has_rows(self) -> bool:
        return len(self._rows) > 0

    @override
    def load(self) -> worker_pb2.WorkerLoad:
        running = [] if self._run is None else list(self._run.live.values())
        waiting = [*self._waiting, *(row for rows in self._split for row in rows)]
        return worker_pb2.WorkerLoad(
            slots=self._limits.slots,
            running=len(running),
            waiting=len(waiting),
            context_tokens=self._limits.context_tokens,
            steps=self._steps,
            running_tokens=sum(len(row.tokens) for row in running),
            waiting_tokens=sum(len(row.tokens) for row in waiting),
            max_tasks=self._limits.slots + self._limits.max_waiting,
            batch_running=bool(running),
        )
