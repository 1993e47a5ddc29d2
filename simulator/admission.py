"""Admission in the simulation: the gateway's own code refuses requests that would be late.

Like a gateway it decides by the batcher's latest report. With a single model there is no smaller
one to degrade to.
"""

import math
from collections.abc import Sequence
from typing import Final

from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.queue import Queue
from gateway.admission.overload import AnswerKind, Outlook, OverloadControl, SchedulingParams
from gateway.streaming.load_table import ModelLoadTable
from simulator.trace import Arrival
from sluice.internal.v1 import control_pb2

REPORT_S: Final = 1.0
"""Interval of the batcher's reports, in seconds."""
BUSY_REPORT_S: Final = 0.25
"""Interval of reports while requests wait, in seconds."""
CAPACITY_REPORT_S: Final = 0.05
"""Delay of the report that capacity is used up or free again, in seconds."""
MODEL: Final = "model"


class SimulatedAdmission:
    """One gateway and its view of one batcher."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._loads = ModelLoadTable()
        self._overload = OverloadControl(self._loads, ())

    def report(self, now: float, capacities: Sequence[Capacity]) -> None:
        """Handle a report of the batcher with the capacities of its workers."""
        report = control_pb2.BatcherReport(batcher="batcher")
        report.models.add(
            model=MODEL,
            workers=len(capacities),
            queued=len(self._queue),
            classes=self._queue.waits.class_reports(now, capacities),
            tokens_per_s=self._queue.waits.tokens_per_s(now),
        )
        # What is sent at this very time is not in it.
        self._loads.update(report, math.nextafter(now, -math.inf))

    def admit(self, arrival: Arrival, now: float, *, always: bool) -> Outlook | None:
        """Record a request that is sent to the batcher; return what is expected of it.

        None: it is refused, because it is expected to be late; not with `always`.
        """
        timeout_s = math.inf if arrival.timeout_s is None else arrival.timeout_s
        params = SchedulingParams(
            arrival.priority_class,
            arrival.at_s + timeout_s,
            tenant=arrival.tenant,
            workload=arrival.workload,
            prompt_tokens=arrival.prompt_tokens,
            max_tokens=arrival.max_tokens,
        )
        outlook = self._overload.outlook(MODEL, params, now)
        if outlook.problem is not None and not always:
            return None
        tokens = arrival.prompt_tokens + arrival.max_tokens
        self._overload.sent(MODEL, MODEL, arrival.priority_class, tokens, now, arrival.tenant)
        return outlook

    def ended(self, arrival: Arrival) -> None:
        """Learn from an answer."""
        kind = AnswerKind(MODEL, arrival.tenant, arrival.workload)
        is_cut = arrival.answer_tokens >= arrival.max_tokens
        self._overload.lengths.observe(kind, arrival.answer_tokens, is_cut=is_cut)
