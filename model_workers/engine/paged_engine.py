"""Continuous batching over a paged model; docs/internals/engine.md walks through a step.

With `overlap` the host plans and begins a step while the device still computes the one before, whose draws are read
later (asynchronous scheduling in vLLM and SGLang). The drawn tokens are fed to the next step on the device
(`PagedModel.feed`); the host does not know them when it plans:

- A sequence that ends with a stop token is computed once more; the result is dropped.
- A sequence whose draw depends on its tokens (penalties, constraints, drafts), or that wants log-probabilities of given
  tokens, has its step read at once.
"""

import logging
from collections import abc
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from model_workers.engine.blocks import BlockManager
from model_workers.engine.pace import BulkPace
from model_workers.engine.paged_model import Fault, FaultIsolator, PagedModel, SequenceChunk
from model_workers.engine.protocol import SequenceEnd, SequenceSpec, SequenceStep
from model_workers.engine.sampling.sampler import (
    NO_DISTRIBUTION,
    DrawRequest,
    DrawResult,
    PendingDraw,
    Sampler,
)
from model_workers.engine.scheduler import ScheduledEngine, Scheduler
from model_workers.engine.sequences import Sequence, SequenceLimits, SequenceState
from model_workers.engine.speculation import Speculator
from sluice.errors import InvalidRequest
from sluice.internal.v1.worker_pb2 import WorkerLoad
from sluice.settings.models import PrefixCache

logger = logging.getLogger(__name__)

NO_TOKENS: Final = DrawResult()
"""Result of a sequence that drew nothing."""
CPU: Final = torch.device("cpu")


@dataclass(slots=True)
class PlannedSequence:
    """What a step does for one sequence.

    Attributes:
        count: Pending tokens to compute; after the last one a token is drawn.
        drafted: Drafted next tokens, computed and verified in the same step.
    """

    sequence: Sequence
    count: int
    drafted: abc.Sequence[int] = ()

    def chunk(self) -> SequenceChunk:
        """Return the model's input."""
        sequence, start = self.sequence, self.sequence.computed
        tokens = sequence.tokens[start : start + self.count]
        if self.drafted:
            tokens += self.drafted
        return SequenceChunk(tokens, start, sequence.table.blocks, self.logits_count)

    @property
    def logits_count(self) -> int:
        """Number of last tokens whose logits are wanted."""
        sequence = self.sequence
        if sequence.scored:
            return min(self.count, max(0, sequence.computed + self.count - sequence.scored_from))
        return 1 + len(self.drafted) if self.count == sequence.pending else 0

    def draw_request(self) -> DrawRequest:
        """Return the sampler's input."""
        assert self.sequence.sampling is not None
        return DrawRequest(self.sequence.sampling, self.drafted)


@dataclass(frozen=True, slots=True)
class BegunStep:
    """A step whose draws are not read yet.

    Attributes:
        broken: Sequences that could not be computed.
        computed: The others, except `scored`.
        drawing: Those of them that draw, in the order of `drawn`.
        scored: Sequences that want log-probabilities of given tokens, with the logits for these.
    """

    broken: abc.Sequence[tuple[Sequence, Fault]]
    computed: abc.Sequence[PlannedSequence]
    drawing: abc.Sequence[PlannedSequence]
    drawn: PendingDraw | None
    scored: abc.Sequence[tuple[PlannedSequence, Tensor]]

    @property
    def waits(self) -> bool:
        """Whether it must be read before the next step is planned."""
        return bool(self.scored) or any(
            item.sequence.sampling is None or item.sequence.sampling.reads_tokens
            for item in self.drawing
        )


class PagedEngine(ScheduledEngine):
    """An engine of scheduler, paged model and sampler; see `Engine`."""

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
        """Create an engine without sequences.

        - `overlap`: Whether a step begins before the draws of the one before are read; ignored with a speculator.
        """
        blocks = BlockManager(model.num_blocks, model.block_tokens, prefix_cache=prefix_cache)
        limits = SequenceLimits(
            slots, max_waiting, model.context_tokens, prefill_tokens, model.vocab_size
        )
        super().__init__(Scheduler(blocks, limits, sequences_cost_time=device.type == "cpu"))
        self._runner = FaultIsolator(model)
        self.sampler = sampler
        self._speculator = speculator
        # A thread's current device is the first one, and pinned memory, streams and libraries follow it.
        self._on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        self._overlap = overlap and speculator is None
        self._pace = BulkPace()
        self._begun: BegunStep | None = None

    @override
    def add(self, sequence: SequenceSpec, now: float) -> None:
        if sequence.values is not None and not sequence.values.scored_token_ids:
            raise InvalidRequest(
                "this model gives log-probabilities of tokens alone: name the tokens"
            )
        sampling = self.sampler.open(sequence)
        self._scheduler.add(sequence).sampling = sampling

    @torch.inference_mode()
    @override
    def step(self, now: float) -> list[SequenceStep]:
        self._steps += 1
        swept = self._scheduler.sweep(now)
        # 1. Cancelled and expired sequences leave before anything is computed for them.
        steps = [sequence.end_step(end) for sequence, end in swept]
        # 2. The scheduler says which tokens are computed; bulk prompts have a limit of their own.
        planned = self._scheduler.schedule(self._pace.limit(self._scheduler.most_urgent(), now))
        if not planned and self._begun is None:
            return steps
        self._pace.begin(sum(count for sequence, count in planned if sequence.pending > 1), now)
        with self._on_device:
            if self._speculator is not None:
                steps += self._speculate(planned, self._speculator)
            else:
                steps += self._compute([PlannedSequence(*pair) for pair in planned])
        if not self._scheduler.has_sequences():
            self._pace.pause()
        return steps

    @override
    def abort(self, message: str) -> list[SequenceStep]:
        self._begun = None
        return [self._fail(sequence, Fault(message)) for sequence in self._scheduler.sequences()]

    @override
    def load(self) -> WorkerLoad:
        load = self._scheduler.load(self._steps)
        if self._speculator is not None:
            load.drafted_tokens = self._speculator.drafted
            load.accepted_tokens = self._speculator.accepted
        if self._scheduler.blocks.prefix_cache == "off":
            # A preempted sequence would be computed again as a whole: batchers should not count on preemption.
            del load.classes[:]
        return load

    def _speculate(
        self, planned: abc.Sequence[tuple[Sequence, int]], speculator: Speculator
    ) -> list[SequenceStep]:
        decoding = [
            sequence for sequence, _ in planned if sequence.pending == 1 and not sequence.scored
        ]
        drafts = speculator.draft(decoding, self._scheduler.widen)
        work = [
            PlannedSequence(sequence, count, drafts.get(sequence, ()))
            for sequence, count in planned
        ]
        steps = self._compute(work)
        if len(decoding) == len(planned):
            speculator.measure(decoding, drafts, sum(len(step.token_ids) for step in steps))
        return steps

    def _compute(self, work: abc.Sequence[PlannedSequence]) -> list[SequenceStep]:
        """Begin a step, then read the draws of the one before; its own too, unless they are read with the next step."""
        # The order matters: the device gets the new step before the host reads the draws of the old one.
        before, self._begun = self._begun, None
        step = self._begin(work) if work else None
        steps = self._end(before) if before is not None else []
        if step is None:
            return steps
        # Sequences may have ended with the draws that were just read.
        for item in step.computed:
            if item.sequence.state is SequenceState.RUNNING:
                self._scheduler.advance(item.sequence, item.count)
        if not self._overlap or step.waits:
            return steps + self._end(step)
        # The next step is planned with a placeholder for each token that is still being drawn.
        for place, item in enumerate(step.drawing):
            if item.sequence.state is SequenceState.RUNNING:
                item.sequence.expect(place)
        self._begun = step
        return steps

    def _begin(self, work: abc.Sequence[PlannedSequence]) -> BegunStep:
        model = self._runner.model
        if self._scheduler.copies:
            model.copy_blocks(self._scheduler.copies)
        logits, faults = self._runner.forward([item.chunk() for item in work])
        # What fails on its own is left out; the rest of the step goes on.
        broken = [(work[place].sequence, fault) for place, fault in faults.items()]
        whole = [item for place, item in enumerate(work) if place not in faults]
        scored: list[tuple[PlannedSequence, Tensor]] = []
        # Scored sequences draw nothing: their logits leave the batch before the sampler sees it.
        if any(item.sequence.scored for item in whole):
            logits, scored = _split(logits, whole)
            whole = [item for item in whole if not item.sequence.scored]
        drawing = [item for item in whole if item.count == item.sequence.pending]
        drawn = None
        if drawing:
            drawn = self.sampler.begin(logits, [item.draw_request() for item in drawing])
        step = BegunStep(broken, whole, drawing, drawn, scored)
        if drawn is not None and self._overlap and not step.waits:
            model.feed(drawn.tokens)
        return step

    def _end(self, step: BegunStep) -> list[SequenceStep]:
        """Read the draws of a step. Sequences that have ended since it began get nothing of it."""
        steps = [
            self._fail(*pair) for pair in step.broken if pair[0].state is not SequenceState.ENDED
        ]
        for item, logits in step.scored:
            steps += self._take_scores(item, logits)
        if step.drawn is not None:
            pairs = zip(step.drawing, step.drawn.read(), strict=True)
            steps += [
                self._take(item, drawn)
                for item, drawn in pairs
                if item.sequence.state is not SequenceState.ENDED
            ]
        return steps

    def _take_scores(self, item: PlannedSequence, logits: Tensor) -> list[SequenceStep]:
        sequence = item.sequence
        if len(logits):
            # Index of the first of these positions among all scored ones.
            first = sequence.computed + item.count - len(logits) - sequence.scored_from
            if not first:
                sequence.scores.clear()  # of an earlier attempt, before the sequence was preempted
            token_ids = sequence.scored[first : first + len(logits)]
            tokens = torch.tensor(token_ids, device=logits.device)
            logprobs = logits.log_softmax(-1)
            chosen = logprobs.gather(1, tokens[:, None]).flatten().tolist()
            best = logprobs.topk(sequence.alternatives)
            ids, values = best.indices.flatten().tolist(), best.values.flatten().tolist()
            sequence.scores.append((chosen, ids, values))
        self._scheduler.advance(sequence, item.count)
        # Further chunks of the prompt follow.
        if sequence.pending:
            return []
        columns = zip(*sequence.scores, strict=True)
        scores = np.array([*chain.from_iterable(chain.from_iterable(columns))], dtype="<f4")
        if not np.isfinite(scores).all():
            return [self._fail(sequence, Fault(NO_DISTRIBUTION, of_sequence=True))]
        self._scheduler.finish(sequence)
        return [sequence.end_with(scores.tobytes())]

    def _take(self, item: PlannedSequence, drawn: DrawResult) -> SequenceStep:
        sequence = item.sequence
        if drawn.error:
            return self._fail(
                sequence, Fault(drawn.error, of_sequence=True, field=drawn.field), drawn
            )
        step = sequence.take(drawn.token_ids, drawn.logprobs)
        # Accepted drafts are in the cache already; the last token is computed with the next step.
        if item.drafted:
            self._scheduler.advance(sequence, len(drawn.token_ids) - 1)
        if self._speculator is not None:
            self._speculator.accept(sequence, len(item.drafted), len(drawn.token_ids))
        if step.end is not None:
            self._scheduler.finish(sequence)
        return step

    def _fail(
        self, sequence: Sequence, fault: Fault, drawn: DrawResult = NO_TOKENS
    ) -> SequenceStep:
        """End a sequence. Its cache content may be broken, so its blocks are cleared and not shared."""
        # A caller who sends many requests that cannot be answered does not fill the log.
        level = logging.DEBUG if fault.field else logging.WARNING
        logger.log(level, "request %s failed: %s", sequence.spec.request_id, fault.message)
        # NaN in a freed block would spread to its next owner (0 x NaN is NaN): clear the blocks.
        freed = self._scheduler.discard(sequence)
        step = sequence.take(drawn.token_ids, drawn.logprobs)
        if freed:
            self._runner.model.clear_blocks(freed)
            if self._speculator is not None:
                self._speculator.clear(freed)
        end = SequenceEnd.FAILED if fault.of_sequence else SequenceEnd.RETURNED
        return step.failed(end, fault.message, fault.field)


def _split(
    logits: Tensor, work: abc.Sequence[PlannedSequence]
) -> tuple[Tensor, list[tuple[PlannedSequence, Tensor]]]:
    """Return the logits of the sequences that draw, and the sequences that want log-probabilities with theirs."""
    parts = torch.split(logits, [item.logits_count for item in work])
    pairs = list(zip(work, parts, strict=True))
    drawing = [part for item, part in pairs if not item.sequence.scored]
    scored = [(item, part) for item, part in pairs if item.sequence.scored]
    return torch.cat(drawing) if drawing else logits[:0], scored
