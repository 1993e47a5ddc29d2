"""What is learned from an answer that has ended: its outcome is kept, and shadows are asked the same.

Nothing here is on the way of an answer: shadows are rows of class bulk, sent when the caller has its answer. Where one
cannot be had cheaply it is dropped and counted.
"""

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Final

from opentelemetry.trace import Span

from gateway.admission.overload import OverloadControl, SchedulingParams
from gateway.admission.pipeline import AdmittedRequest
from gateway.admission.prompts import prepare
from gateway.admission.usage import UsageAccounting
from gateway.records.agreement import agreement
from gateway.records.outcome import add_shadow, blocked, learnable, outcome_of
from gateway.records.record_builder import RecordBuilder
from gateway.records.store import RecordStore
from gateway.routing.rules import SHADOW, drawn
from gateway.streaming.stream import Stream
from gateway.telemetry.drift import DriftMonitor
from gateway.telemetry.spans import CallSpans
from gateway.upstream.model_rows import OwnRow, Rows, Wanted
from gateway.upstream.tasks import leg_of
from gateway.validation.requests import ValidRequest
from sluice.errors import SluiceError
from sluice.internal.v1.outcome_pb2 import Outcome
from sluice.telemetry import names
from sluice.telemetry.tracing import headers_of
from sluice.v1.admin_pb2 import ShadowRun
from sluice.wire.clock import duration

_log = logging.getLogger(__name__)

IN_FLIGHT_MAX: Final = 32
"""Shadows of one gateway that may run at once."""
LIMIT_S: Final = 60.0
"""A shadow that has not answered by then is given up."""
CLASS: Final = "bulk"

IN_FLIGHT: Final = "in_flight"
"""Why a shadow was dropped; else the reason of an error in small letters."""
BLOCKED: Final = "safety_blocked"
_FAILED: Final = "internal"


@dataclass(frozen=True)
class Ended:
    """A request that something may be learned from."""

    request: ValidRequest
    admitted: AdmittedRequest
    record: RecordBuilder
    spans: CallSpans
    stream: Stream


class Shadowing:
    """Asks shadows; the one owner of those that run.

    Attributes:
        dropped: shadows that were not asked, or did not answer, by reason.
    """

    def __init__(
        self,
        rows: Rows,
        overload: OverloadControl,
        usage: UsageAccounting,
        store: RecordStore,
        drift: DriftMonitor,
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self._rows = rows
        self._overload = overload
        self._usage = usage
        self._store = store
        self._drift = drift
        self._running: set[asyncio.Task[None]] = set()

    def ended(self, ended: Ended) -> None:
        """Keeps the outcome of a request that has just ended, and has its shadows asked."""
        try:
            self._learn_from(ended)
        except Exception:  # the frames of other answers that came with its last one would be lost
            _log.exception("request %s: nothing was learned", ended.stream.request_id)

    async def close(self) -> None:
        """Cancels those that run, and says how many were dropped."""
        if self.dropped:
            _log.info("shadows dropped: %s", dict(self.dropped))
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _learn_from(self, ended: Ended) -> None:
        learning, stream = ended.admitted.plan.learning, ended.stream
        if learning is None or not learnable(ended.request, stream):
            return
        prompt = ended.admitted.conversation.user_text
        outcome = outcome_of(ended.request, prompt, learning, stream)
        if outcome is not None:
            self._store.write_outcome(outcome)
        trials = drawn(learning.shadows, stream.leg.model, stream.request_id, SHADOW)
        for number, trial in enumerate(trials, 1):
            row_id = f"{stream.request_id}-s{number}"
            self._begin(_Shadow(ended, outcome, row_id, ShadowRun(model=trial.model)))

    def _begin(self, shadow: "_Shadow") -> None:
        now = time.monotonic()
        problem = self._overload.problem(
            shadow.run.model, SchedulingParams(CLASS, now + LIMIT_S), now
        )
        if problem is not None:
            self._drop(shadow, problem.reason.lower())
        elif len(self._running) >= IN_FLIGHT_MAX:
            self._drop(shadow, IN_FLIGHT)
        else:
            task = asyncio.ensure_future(self._run(shadow))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self, shadow: "_Shadow") -> None:
        try:
            await self._ask(shadow)
        except SluiceError as error:
            self._drop(shadow, error.reason.lower())
        except Exception:  # the task would die silently
            _log.exception("request %s: a shadow failed", shadow.ended.stream.request_id)
            self._drop(shadow, _FAILED)

    async def _ask(self, shadow: "_Shadow") -> None:
        ended, begun = shadow.ended, time.monotonic()
        attributes = {names.GEN_AI_REQUEST_MODEL: shadow.run.model, names.PRIORITY_CLASS: CLASS}
        with ended.spans.hop(names.SPAN_SHADOW, attributes=attributes) as span:
            row = OwnRow(self._rows, await self._wanted(shadow, span, begun))
            try:
                stream = await row.answered()
            finally:
                now, leg = time.monotonic(), row.stream.leg
                # Of the breaker, and not of the tenant's budget: it did not ask for this.
                self._usage.judge(leg.model, row.stream.error, now)
                shadow.run.prompt_tokens = leg.prompt_tokens
                shadow.run.completion_tokens = len(leg.transcript.token_ids)
                shadow.run.cost = self._usage.cost(leg)
                shadow.run.duration.CopyFrom(duration((now - begun) * 1000))
            if blocked(stream):
                self._drop(shadow, BLOCKED)
                return
            agreed = agreement(ended.stream.leg.said, stream.leg.said)
            span.set_attribute(names.SHADOW_AGREEMENT, agreed)
        self._compared(shadow, stream, agreed)

    async def _wanted(self, shadow: "_Shadow", span: Span, now: float) -> Wanted:
        """The same conversation, with what the caller wanted of an answer."""
        admitted, model = shadow.ended.admitted, self._rows.admission.catalog[shadow.run.model]
        request = replace(shadow.ended.request, priority_class=CLASS)
        prepared = await prepare(request, admitted.conversation, model, admitted.first.inspect)
        prepared.sampling.seed = admitted.first.sampling.seed
        leg = leg_of(request, prepared, shadow.row_id, (), self._rows.stall_s, now)
        return Wanted(request, prepared, leg, now + LIMIT_S, headers_of(span), request.workload)

    def _compared(self, shadow: "_Shadow", stream: Stream, agreed: float) -> None:
        run, outcome = shadow.run, shadow.outcome
        run.agreement = agreed
        if outcome is not None and add_shadow(outcome, stream.leg, agreed):
            self._store.write_outcome(outcome)
        shadow.ended.record.add_shadow(run)
        self._observe(shadow, agreed)

    def _observe(self, shadow: "_Shadow", agreed: float) -> None:
        """Tells how the weak one of the two models that are compared did; of others routers say nothing."""
        plan, answered = shadow.ended.admitted.plan, shadow.ended.stream.leg.model
        assert plan.learning is not None, "it has shadows"
        pair = plan.learning.pair
        if pair is not None and {answered, shadow.run.model} == set(pair):
            self._drift.compared(plan, pair[0], agreed, shadow.row_id)

    def _drop(self, shadow: "_Shadow", reason: str) -> None:
        self.dropped[reason] += 1
        shadow.run.dropped = reason
        shadow.ended.record.add_shadow(shadow.run)


@dataclass(frozen=True)
class _Shadow:
    """One model that is asked the same; ``run`` is filled in."""

    ended: Ended
    outcome: Outcome | None
    row_id: str
    run: ShadowRun
