"""Queue of one model: add requests, form batches, finish. The package's docstring has the rules."""

from collections.abc import Mapping, Sequence

from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.entry import Decision, QueueEntry
from batcher.core.scheduler.estimates import OutputLengths
from batcher.core.scheduler.order import Order
from batcher.core.scheduler.placement import Placement
from batcher.core.scheduler.policy import BatchPolicy
from batcher.core.scheduler.waits import ExpectedWaits
from sluice.settings.batching import Policy


class Queue:
    """Requests of one model: the waiting ones, and those in workers until `finish`.

    One `Order` decides who is next under every policy; the batch policy decides when a batch goes
    and what joins it.

    Attributes:
        order: the waiting requests; read-only for others.
        waits: predicts how long a new request waits.
    """

    def __init__(self, policy: Policy, weights: Mapping[str, float] | None = None) -> None:
        """Create an empty queue; `weights` has the tenants whose weight is not 1."""
        self._lengths = OutputLengths(policy.output_quantile)
        self.order = Order(policy, weights or {}, self._lengths.estimate)
        self._placement = Placement(self.order)
        self._batching = BatchPolicy(self.order, self._placement)
        self.waits = ExpectedWaits(self.order, self.window_s)

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return self.order.waiting

    # The life cycle of a request.

    def add(self, entry: QueueEntry, now: float) -> None:
        """Add a request that the queue does not have."""
        self.order.add(entry, now)
        self._batching.on_wait(entry)

    def cancel(self, entry: QueueEntry) -> None:
        """Remove a waiting request."""
        self._batching.on_cancel(entry)
        self.order.cancel(entry)

    def finish(
        self,
        entry: QueueEntry,
        output_tokens: int,
        now: float,
        *,
        whole: bool = True,
        decode_s: float = 0.0,
    ) -> None:
        """Remove a request that was handed out and needs no worker any more.

        Args:
            entry: the request.
            output_tokens: length of the whole answer, including tokens that came with the request.
            now: monotonic seconds.
            whole: whether the answer ended by itself, so that estimates learn from it.
            decode_s: seconds from the first new token to the last.
        """
        members = self.order.classes[entry.priority_class]
        members.charge(entry, entry.prompt_tokens + output_tokens)
        if whole:
            members.served(now - entry.sent_at)
            self._lengths.observe(entry, output_tokens)
            produced = entry.prefill_tokens - entry.prompt_tokens
            self.waits.speeds.end(entry, output_tokens - produced, decode_s, now)
        self.on_answered(entry, now if whole else None)
        self.waits.on_left(entry, now)

    def reconfigure(self, policy: Policy, weights: Mapping[str, float]) -> None:
        """Continue under another policy or other weights.

        Requests keep their waiting times and workers, tenants what they are ahead or behind in
        their shares.
        """
        self._lengths.quantile = policy.output_quantile
        waiting = self.order.change(policy, weights)
        self._batching = BatchPolicy(self.order, self._placement, self._batching)
        for entry in waiting:
            self._batching.on_wait(entry)

    def on_answered(self, entry: QueueEntry, now: float | None) -> None:
        """Handle the first token or the end of a request; without `now` no latency is learned."""
        batch = entry.batch
        if entry.answered or batch is None:
            return
        entry.answered = True
        batch.answered += 1
        if batch.answered == len(batch.entries) and now is not None:
            self._batching.on_answered(batch, now)

    # Decisions.

    def next_batch(self, now: float, capacities: Sequence[Capacity]) -> Decision:
        """Form one batch for one of the model's live workers.

        The caller has cancelled requests whose deadline has passed.
        """
        decision = self._batching.form(now, capacities)
        self.waits.on_decision(decision, now)
        return decision

    def window_s(self, priority_class: str, now: float) -> float:
        """Return how long, at most, the policy lets a new request wait for others, in seconds."""
        return self._batching.window_s(priority_class, now)
