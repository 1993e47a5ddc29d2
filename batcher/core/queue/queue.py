"""Tasks of one model: what comes, goes out, comes back and ends. The rules are in the package's docstring."""

import math
from collections.abc import Mapping, Sequence

from batcher.core.batches import Batch, Decision
from batcher.core.queue.entries import Entry
from batcher.core.queue.forming import Former
from batcher.core.queue.lengths import OutputLengths
from batcher.core.queue.rates import HandoutRate
from batcher.core.queue.waiting import Waiting
from batcher.core.replicas import Replica
from batcher.core.tasks import QueuedTask
from sluice.settings.batching import Policy
from sluice.wire.subjects import CLASSES


class Queue:
    """Tasks of one model: those that wait, and those handed out until `finish`.

    Args:
        weights: of tenants that differ from 1.
    """

    def __init__(self, policy: Policy, weights: Mapping[str, float] | None = None) -> None:
        self._entries: dict[str, Entry] = {}
        self._numbers = 0
        self._rate = HandoutRate()
        self._lengths = OutputLengths(policy.output_quantile)
        self._waiting = Waiting(policy, weights or {}, self._lengths)
        self._former = Former(policy, self._waiting)

    def __len__(self) -> int:
        """Tasks that wait."""
        return self._waiting.count

    # The life of a task.

    def add(self, task: QueuedTask, now: float) -> None:
        """Takes a task that the queue does not hold."""
        entry = Entry(task)
        held = self._entries.setdefault(task.request_id, entry)
        assert held is entry, task.request_id
        self._wait(entry, now)

    def cancel(self, request_id: str) -> None:
        """Forgets a task, waiting or handed out; unknown ones are ignored."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        if entry.number:
            self._waiting.forget(entry)
        else:
            self._former.landed(entry.batch, None)

    def finish(
        self, request_id: str, output_tokens: int, now: float, *, whole: bool = True
    ) -> None:
        """Forgets a task that was handed out and needs no worker any more.

        Args:
            output_tokens: of the whole answer, what existed when the task came included.
            whole: the answer ended by itself: it tells what to expect of others.
        """
        entry = self._entries.pop(request_id)
        assert not entry.number, request_id
        members = self._waiting.of(entry.task.priority_class)
        members.settle(entry, entry.task.prompt_tokens + output_tokens)
        if whole:
            members.served(now - entry.batch.sent_at)
            self._lengths.observe(entry.task, output_tokens)
        self._former.landed(entry.batch, now if whole else None)

    def requeue(self, request_id: str, produced: int, now: float) -> None:
        """Puts a task that was handed out back to the head of its class.

        ``produced`` tokens of its answer exist now, what existed when it came included.
        """
        entry = self._entries[request_id]
        assert not entry.number, request_id
        assert produced >= entry.task.produced, request_id
        self._former.landed(entry.batch, None)
        entry = self._entries[request_id] = entry.again(produced)
        self._wait(entry, now)

    def reconfigure(self, policy: Policy, weights: Mapping[str, float]) -> None:
        """Goes on under another policy: what waits keeps its time, what is out stays out; shares begin anew."""
        self._lengths.quantile = policy.output_quantile
        learned = {name: self.service_s(name) for name in CLASSES}
        self._waiting = Waiting(policy, weights, self._lengths)
        for name, service_s in learned.items():
            self._waiting.of(name).served(service_s)
        self._former.reconfigure(policy, self._waiting)
        waiting = [entry for entry in self._entries.values() if entry.number]
        for entry in sorted(waiting, key=_number):
            self._waiting.push(entry, entry.since)

    def _wait(self, entry: Entry, now: float) -> None:
        self._numbers = entry.number = self._numbers + 1
        entry.since = now
        self._lengths.estimate(entry)
        self._waiting.push(entry, now)

    # Decisions.

    def next_batch(self, now: float, replicas: Sequence[Replica]) -> Decision:
        """Forms one batch for one of ``replicas``, the live workers of the model."""
        expired = self._expire(now)
        before = self._waiting.handed_out
        formed = self._former.form(now, replicas)
        self._rate.decided(self._waiting.handed_out - before, self._waiting.count, now)
        if isinstance(formed, Batch):
            return Decision(formed, expired, now)
        return Decision(None, expired, self._wake_at(formed))

    def _expire(self, now: float) -> tuple[str, ...]:
        expired = self._waiting.pop_expired(now)
        if not expired:
            return ()
        for entry in expired:
            del self._entries[entry.task.request_id]
        return tuple([entry.task.request_id for entry in expired])

    def _wake_at(self, at: float | None) -> float | None:
        deadline = self._waiting.next_deadline()
        if at is not None:
            return min(at, deadline)
        return None if math.isinf(deadline) else deadline

    # What waits, and for how long.

    def waiting(self, priority_class: str) -> int:
        """Tasks of one class that wait."""
        return self._waiting.count_of(priority_class)

    def waiting_tokens(self, priority_class: str) -> int:
        """Their prompts and expected answers, tokens."""
        return self._waiting.tokens_of(priority_class)

    @property
    def tokens_per_s(self) -> float:
        """Prompts and expected answers that were handed out a second while tasks waited; 0: not known."""
        return self._rate.tokens_per_s

    def service_s(self, priority_class: str) -> float:
        """How long answers of the class took lately, from being handed out to the end; 0: not known."""
        return self._waiting.of(priority_class).service_s

    def expected_wait(
        self, priority_class: str, now: float, tenant: str = "default", *, backlog_tokens: float = 0
    ) -> float:
        """How long a task that came now would wait here, seconds; 0 also when that is not known.

        Args:
            backlog_tokens: of tasks elsewhere that go before it.
        """
        rate = self._rate.tokens_per_s
        if not rate:
            return 0.0
        return (self._waiting.tokens_before(priority_class, tenant) + backlog_tokens) / rate


def _number(entry: Entry) -> int:
    return entry.number
