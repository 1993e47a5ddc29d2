"""Continuous batching over a paged model; docs/internals/engine.md walks through a step.

With ``overlap`` the host plans and begins a step while the device still computes the one before, whose draws are read
after that (asynchronous scheduling, as vLLM and SGLang call it). The tokens of those draws are fed from draw to step on
the device (`PagedModel.feed`); the host does not know them when it plans, so:

- A row that ends with a stop token is computed once more, in vain. What that step draws for it is dropped.
- A row whose draw depends on its tokens (penalties, constraints, drafts), or that wants log-probabilities, has its
  step read at once.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from model_workers.engine.blocks import BlockManager
from model_workers.engine.pace import BulkPace
from model_workers.engine.paged_model import Fault, FaultIsolator, PagedModel, RowChunk
from model_workers.engine.protocol import RowEnd, RowInvalid, RowSpec, RowStep
from model_workers.engine.rows import Row, RowLimits, RowState
from model_workers.engine.sampling.sampler import (
    NO_DISTRIBUTION,
    DrawRequest,
    DrawResult,
    PendingDraw,
    Sampler,
)
from model_workers.engine.scheduler import ScheduledEngine, Scheduler
from model_workers.engine.speculation import Speculator
from sluice.internal.v1 import worker_pb2
from sluice.settings.models import PrefixCache

log = logging.getLogger(__name__)

NO_TOKENS: Final = DrawResult()
CPU: Final = torch.device("cpu")


@dataclass(slots=True)
class PlannedRow:
    """What a step does for one row.

    Attributes:
        count: pending tokens to compute; after the last one a token is drawn.
        drafted: drafted next tokens, computed and verified in the same step.
    """

    row: Row
    count: int
    drafted: Sequence[int] = ()

    def chunk(self) -> RowChunk:
        """The model's input."""
        row, start = self.row, self.row.computed
        tokens = row.tokens[start : start + self.count]
        if self.drafted:
            tokens += self.drafted
        return RowChunk(tokens, start, row.table.blocks, self.wanted)

    @property
    def wanted(self) -> int:
        """For how many of its last tokens logits are wanted."""
        row = self.row
        if row.scored:
            return min(self.count, max(0, row.computed + self.count - row.scored_from))
        return 1 + len(self.drafted) if self.count == row.pending else 0

    def draw_request(self) -> DrawRequest:
        """The sampler's input."""
        assert self.row.sampling is not None
        return DrawRequest(self.row.sampling, self.drafted)


@dataclass(frozen=True, slots=True)
class BegunStep:
    """A step whose draws are not read yet.

    Attributes:
        broken: rows that could not be computed.
        computed: the others that draw or have more to compute.
        drawing: those of them that draw, in the order of ``drawn``.
        scored: rows that want log-probabilities, and the logits of these.
    """

    broken: Sequence[tuple[Row, Fault]]
    computed: Sequence[PlannedRow]
    drawing: Sequence[PlannedRow]
    drawn: PendingDraw | None
    scored: Sequence[tuple[PlannedRow, Tensor]]

    @property
    def waits(self) -> bool:
        """Whether it must be read before the next step is planned."""
        return bool(self.scored) or any(
            item.row.sampling is None or item.row.sampling.reads_tokens for item in self.drawing
        )


class PagedEngine(ScheduledEngine):
    """See `Engine`. The scheduler decides, the model computes, the sampler draws."""

    def __init__(
        self,
        model: PagedModel,
        sampler: Sampler,
        *,
        slots: int,
        max_waiting: int,
        prefill_tokens: int,
        prefix_cache: PrefixCache = "tenant",
        speculator: Speculator | None = None,
        device: torch.device = CPU,
        overlap: bool = False,
    ) -> None:
        """Makes one without rows.

        Args:
            overlap: begins a step before the draws of the one before are read; not with a speculator.
        """
        blocks = BlockManager(model.num_blocks, model.block_tokens, prefix_cache=prefix_cache)
        limits = RowLimits(slots, max_waiting, model.context_tokens, prefill_tokens)
        super().__init__(Scheduler(blocks, limits, rows_cost_time=device.type == "cpu"))
        self._runner = FaultIsolator(model)
        self.sampler = sampler
        self._speculator = speculator
        self._vocabulary = model.vocab_size
        # A thread's current device is the first one, and pinned memory, streams and libraries follow it.
        self._on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        self._overlap = overlap and speculator is None
        self._pace = BulkPace()
        self._begun: BegunStep | None = None

    @override
    def add(self, row: RowSpec, now: float) -> None:
        highest = max((*row.prompt, *row.produced), default=0)
        if highest >= self._vocabulary:
            raise RowInvalid(f"token {highest} is not one of the model's {self._vocabulary}")
        if row.values is not None:
            _check_scored(row.values.scored_token_ids, self._vocabulary)
        sampling = self.sampler.open(row)
        self._scheduler.add(row).sampling = sampling

    @torch.inference_mode()
    @override
    def step(self, now: float) -> list[RowStep]:
        self._steps += 1
        swept = self._scheduler.sweep(now)
        steps = [row.end_step(end) for row, end in swept]
        planned = self._scheduler.schedule(self._pace.limit(self._scheduler.most_urgent(), now))
        if not planned and self._begun is None:
            return steps
        self._pace.begin(sum(count for row, count in planned if row.pending > 1), now)
        with self._on_device:
            if self._speculator is not None:
                steps += self._speculate(planned, self._speculator)
            else:
                steps += self._compute([PlannedRow(*pair) for pair in planned])
        if not self._scheduler.has_rows():
            self._pace.pause()
        return steps

    @override
    def abort(self, message: str) -> list[RowStep]:
        self._begun = None
        return [self._fail(row, Fault(message)) for row in self._scheduler.rows()]

    @override
    def load(self) -> worker_pb2.WorkerLoad:
        load = self._scheduler.load(self._steps)
        load.preemptions = self._scheduler.preemptions
        if self._speculator is not None:
            load.drafted_tokens = self._speculator.drafted
            load.accepted_tokens = self._speculator.accepted
        if self._scheduler.blocks.prefix_cache == "off":
            # A preempted row would be computed again as a whole: batchers should not count on preemption.
            del load.classes[:]
        return load

    def _speculate(
        self, planned: Sequence[tuple[Row, int]], speculator: Speculator
    ) -> list[RowStep]:
        decoding = [row for row, _ in planned if row.pending == 1 and not row.scored]
        drafts = speculator.draft(decoding, self._scheduler.widen)
        work = [PlannedRow(row, count, drafts.get(row, ())) for row, count in planned]
        steps = self._compute(work)
        if len(decoding) == len(planned):
            speculator.measure(decoding, drafts, sum(len(step.token_ids) for step in steps))
        return steps

    def _compute(self, work: Sequence[PlannedRow]) -> list[RowStep]:
        """Begins a step, then reads the draws of the one before; its own too, unless they are read with the next."""
        before, self._begun = self._begun, None
        begun = self._begin(work) if work else None
        steps = self._end(before) if before is not None else []
        if begun is None:
            return steps
        for item in begun.computed:
            if item.row.state is RowState.RUNNING:
                self._scheduler.advance(item.row, item.count)
        if not self._overlap or begun.waits:
            return steps + self._end(begun)
        for place, item in enumerate(begun.drawing):
            if item.row.state is RowState.RUNNING:
                item.row.expect(place)
        self._begun = begun
        return steps

    def _begin(self, work: Sequence[PlannedRow]) -> BegunStep:
        model = self._runner.model
        if self._scheduler.copies:
            model.copy_blocks(self._scheduler.copies)
        logits, faults = self._runner.forward([item.chunk() for item in work])
        broken = [(work[place].row, fault) for place, fault in faults.items()]
        whole = [item for place, item in enumerate(work) if place not in faults]
        scored: list[tuple[PlannedRow, Tensor]] = []
        if any(item.row.scored for item in whole):
            logits, scored = _split(logits, whole)
            whole = [item for item in whole if not item.row.scored]
        drawing = [item for item in whole if item.count == item.row.pending]
        drawn = None
        if drawing:
            drawn = self.sampler.begin(logits, [item.draw_request() for item in drawing])
        begun = BegunStep(broken, whole, drawing, drawn, scored)
        if drawn is not None and self._overlap and not begun.waits:
            model.feed(drawn.tokens)
        return begun

    def _end(self, begun: BegunStep) -> list[RowStep]:
        """Reads the draws of a step. Rows that have ended since it was begun get nothing of it."""
        steps = [self._fail(*pair) for pair in begun.broken if pair[0].state is not RowState.ENDED]
        for item, logits in begun.scored:
            steps += self._take_scores(item, logits)
        if begun.drawn is not None:
            pairs = zip(begun.drawing, begun.drawn.read(), strict=True)
            steps += [
                self._take(item, drawn)
                for item, drawn in pairs
                if item.row.state is not RowState.ENDED
            ]
        return steps

    def _take_scores(self, item: PlannedRow, logits: Tensor) -> list[RowStep]:
        row = item.row
        if len(logits):
            first = row.computed + item.count - len(logits) - row.scored_from
            tokens = torch.tensor(row.scored[first : first + len(logits)], device=logits.device)
            logprobs = logits.log_softmax(-1)
            found = logprobs.gather(1, tokens[:, None])[:, 0]
            row.scores[first : first + len(logits)] = found.tolist()
            if count := row.alternatives:
                best = logprobs.topk(count)
                places = slice(count * first, count * (first + len(logits)))
                row.best_ids[places] = best.indices.flatten().tolist()
                row.best_scores[places] = best.values.flatten().tolist()
        self._scheduler.advance(row, item.count)
        if row.pending:
            return []
        scores = np.array([*row.scores, *row.best_ids, *row.best_scores], dtype="<f4")
        if not np.isfinite(scores).all():
            return [self._fail(row, Fault(NO_DISTRIBUTION, of_row=True))]
        self._scheduler.finish(row)
        return [row.end_with(scores.tobytes())]

    def _take(self, item: PlannedRow, drawn: DrawResult) -> RowStep:
        row = item.row
        if drawn.error:
            return self._fail(row, Fault(drawn.error, of_row=True, field=drawn.field), drawn)
        step = row.take(drawn.token_ids, drawn.logprobs)
        if item.drafted:
            self._scheduler.advance(row, len(drawn.token_ids) - 1)
        if self._speculator is not None:
            self._speculator.accept(row, len(item.drafted), len(drawn.token_ids))
        if step.end is not None:
            self._scheduler.finish(row)
        return step

    def _fail(self, row: Row, fault: Fault, drawn: DrawResult = NO_TOKENS) -> RowStep:
        """Ends a row. What it left in the cache may be anything, so its blocks are cleared and not shared."""
        # A caller who sends many requests that cannot be answered does not fill the log.
        level = logging.DEBUG if fault.field else logging.WARNING
        log.log(level, "request %s failed: %s", row.spec.request_id, fault.message)
        freed = self._scheduler.discard(row)
        step = row.take(drawn.token_ids, drawn.logprobs)
        if freed:
            self._runner.model.clear_blocks(freed)
            if self._speculator is not None:
                self._speculator.clear(freed)
        end = RowEnd.FAILED if fault.of_row else RowEnd.RETURNED
        return step.failed(end, fault.message, fault.field)


def _split(
    logits: Tensor, work: Sequence[PlannedRow]
) -> tuple[Tensor, list[tuple[PlannedRow, Tensor]]]:
    """The logits of the rows that draw; and the rows that want log-probabilities, with theirs."""
    parts = torch.split(logits, [item.wanted for item in work])
    pairs = list(zip(work, parts, strict=True))
    drawing = [part for item, part in pairs if not item.row.scored]
    scored = [(item, part) for item, part in pairs if item.row.scored]
    return torch.cat(drawing) if drawing else logits[:0], scored


def _check_scored(token_ids: Sequence[int], vocabulary: int) -> None:
    if not token_ids:
        raise RowInvalid("this model gives log-probabilities of tokens alone: name the tokens")
    if max(token_ids) >= vocabulary:
        raise RowInvalid(f"a scored token is not one of the model's {vocabulary}")
