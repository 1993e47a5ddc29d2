"""What a batcher knows of a worker from its channel: whether frames are complete, and how much room there is."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from batcher.core.pace import Pace
from batcher.core.peers import Share
from batcher.core.scheduler.capacity import Capacity, Usage
from batcher.core.transit import Flight, Sent
from sluice.internal.v1 import worker_pb2


class ChannelBroken(Exception):
    """Responses are missing, or come from another process: rows of this channel must be sent again."""


class Channel:
    """One channel, from its opening to its loss. A new one is made for every opening."""

    def __init__(self) -> None:
        self.worker = ""
        self._load = worker_pb2.WorkerLoad()
        self._pace = Pace()
        self._next_sequence = 0
        self._refused = False

    @property
    def live(self) -> bool:
        """Whether the worker has spoken."""
        return self.worker != ""

    @property
    def slots(self) -> int:
        """Rows the worker computes at once; 0 before it has spoken."""
        return self._load.slots

    @property
    def running(self) -> int:
        """Rows in it, of all batchers."""
        return self._load.running

    def step(self, report: worker_pb2.StepReport, now: float) -> None:
        """Takes a response of the channel.

        Raises:
            ChannelBroken: one before it is missing, or the worker is another one.
        """
        if report.sequence != self._next_sequence:
            raise ChannelBroken(f"response {report.sequence} instead of {self._next_sequence}")
        if self.live and report.worker != self.worker:
            raise ChannelBroken(f"worker {report.worker} instead of {self.worker}")
        self.worker = report.worker
        self._next_sequence += 1
        self._refused = False
        self._load = report.load
        self._pace.note(report.load, now)

    def admitted(self, admission: worker_pb2.Admission) -> None:
        """Takes the answer to a batch."""
        # After a refusal nothing is sent until the worker's next word: it would be refused again.
        self._refused = any(refusal.retryable for refusal in admission.refused)
        if admission.HasField("load"):
            self._load = admission.load

    def capacity(self, name: str, sent: Sent, share: Share) -> Capacity:
        """What fits in the worker, without what is other batchers' share."""
        load = self._load
        capacity = Capacity(
            worker=name,
            free_rows=self._free_rows(sent, share),
            free_tokens=self._free_tokens(sent),
            waiting_tokens=load.waiting_tokens + sent.prefill_tokens_unanswered,
            running_rows=load.running + load.waiting,
            batches_in_flight=sent.batches_unanswered,
            step_s=self._pace.step_s,
            prefill_token_s=self._pace.prefill_token_s,
        )
        flights = sent.by_rank
        if self.live and not self._refused and len(load.ranks) == len(flights):
            usages = [
                _usage(rank, flight) for rank, flight in zip(load.ranks, flights, strict=True)
            ]
            capacity = capacity.with_preemption(usages, load.slots, load.places)
        return self._shared(capacity, flights, share)

    def _shared(self, capacity: Capacity, flights: Sequence[Flight], share: Share) -> Capacity:
        ours = accumulate(flight.rows for flight in flights)
        flying = accumulate(flight.unanswered for flight in flights)
        slots = self._load.slots
        preemptible = tuple(
            replace(
                each,
                free_rows=share.of(slots, each.free_rows + unanswered, used, unanswered),
                free_tokens=each.free_tokens / share.batchers,
            )
            for each, used, unanswered in zip(capacity.preemptible, ours, flying, strict=False)
        )
        free_tokens = capacity.free_tokens / share.batchers
        return replace(capacity, free_tokens=free_tokens, preemptible=preemptible)

    def _free_rows(self, sent: Sent, share: Share) -> int:
        if not self.live or self._refused:
            return 0
        load = self._load
        # The worker's own count may be older than what it has of us, so the larger one is believed.
        taken = max(sent.rows - sent.rows_unanswered, load.running + load.waiting)
        free = max(0, load.slots - taken)
        return share.of(load.slots, free, sent.rows, sent.rows_unanswered)

    def _free_tokens(self, sent: Sent) -> float:
        if not self._load.block_tokens:
            return math.inf
        free = self._load.free_blocks * self._load.block_tokens
        # Rows that wait inside the worker have no blocks yet.
        return free - self._load.waiting_tokens - sent.cache_tokens_unanswered


def _usage(load: worker_pb2.RankLoad, flight: Flight) -> Usage:
    """The worker's own count may be older than what it has of us, so the larger one is believed."""
    rows = max(flight.rows - flight.unanswered, load.running + load.waiting)
    return Usage(
        rows + flight.unanswered,
        load.waiting_tokens + flight.prefill_tokens_unanswered,
        load.running_tokens + load.waiting_tokens + flight.cache_tokens_unanswered,
    )
