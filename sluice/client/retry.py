"""When to try again: bounded tries, waits that grow and are spread, never past the deadline.

A refusal for lack of room, which says when to try again, is not counted while there is a deadline: the request waits
here as it would wait in the mesh. Limits and budgets of a tenant are no lack of room, and are final.

A core without a clock: `now` is monotonic seconds; `dice` returns random numbers in [0, 1).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from sluice.client.answer import Delta, Event, Started
from sluice.client.channel import may_resume
from sluice.errors import DeadlinePassed, Overloaded, SluiceError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how soon a client tries again.

    Attributes:
        start_tries: calls until the gateway has accepted the request once, where it does not say when to try again.
        resume_tries: calls in a row without a new token, after it was accepted or where it says when to try again. With
            the waits below the last one of either comes about 17 s after the first failure: enough for a gateway to be
            started again on a busy machine.
        first_wait_s: before the second call, seconds; doubles with each call.
        wait_s_max: the longest wait, seconds.
        start_s: no new call later than this after the first one, until the gateway has accepted the request, seconds;
            None: no such bound. It matters where a connection attempt itself takes long.
    """

    start_tries: int = 16
    resume_tries: int = 16
    first_wait_s: float = 0.1
    wait_s_max: float = 2.0
    start_s: float | None = None

    def wait_s(self, failures: int, dice: float) -> float:
        """Return the seconds to wait after this many failures in a row: half is fixed, half is random."""
        step = min(self.wait_s_max, self.first_wait_s * 2.0 ** (failures - 1))
        return step * (0.5 + dice / 2)


class Retries:
    """Counts the failures of one request that began at `now` and has `timeout_s` seconds (None: no limit)."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_s: float | None,
        now: float,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self._policy = policy
        self._deadline = None if timeout_s is None else now + timeout_s
        self._start_until = None if policy.start_s is None else now + policy.start_s
        self._dice = dice
        self._tries = policy.start_tries
        self._failures = self._refusals = 0
        self._accepted = False

    def saw(self, event: Event) -> None:
        """Reset the count of failures after new tokens; allow more tries after `Started`."""
        if isinstance(event, Started):
            self._tries, self._accepted = self._policy.resume_tries, True
        elif isinstance(event, Delta):
            self._failures = 0

    def progressed(self) -> None:
        """Reset the count of failures after progress of a stream without tokens: the call is accepted."""
        self._tries, self._failures, self._accepted = self._policy.resume_tries, 0, True

    def wait_s_after(self, error: SluiceError, now: float) -> float:
        """Return the seconds to wait before the next call.

        Raises:
            SluiceError: `error`, when there is no next call: another try cannot help, there were enough, or the
                deadline would be over by then.
        """
        if self._is_refusal(error):
            self._refusals += 1
            spread_s = (error.retry_after_s or 0.0) * self._dice() / 2
            return self._before_deadline(error, self._refusals, spread_s, now)
        self._failures += 1
        # A mesh that says when to try again is there, and expects to serve the request then.
        tries = self._tries if error.retry_after_s is None else self._policy.resume_tries
        if not may_resume(error) or self._failures >= tries or self._starts_late(now):
            raise error
        return self._before_deadline(error, self._failures, 0.0, now)

    def _starts_late(self, now: float) -> bool:
        """Tell whether the time to start is over, for a request that was not accepted."""
        return self._start_until is not None and not self._accepted and now >= self._start_until

    def _is_refusal(self, error: SluiceError) -> bool:
        """Return whether the mesh refused a request for lack of capacity and said when to retry."""
        refused = isinstance(error, Overloaded) and error.retry_after_s is not None
        return refused and self._deadline is not None and not self._accepted

    def _before_deadline(
        self, error: SluiceError, failures: int, spread_s: float, now: float
    ) -> float:
        step_s = self._policy.wait_s(failures, self._dice())
        wait_s = max(step_s, (error.retry_after_s or 0.0) + spread_s)
        if self._deadline is not None and now + wait_s >= self._deadline:
            raise error
        return wait_s

    def timeout_s(self, now: float) -> float | None:
        """Return the time left until the deadline, in seconds; None without one.

        Raises:
            DeadlinePassed: nothing is left. (gRPC's asyncio calls take a timeout of 0 for none at all.)
        """
        if self._deadline is None:
            return None
        if now >= self._deadline:
            raise DeadlinePassed("the deadline has passed already")
        return self._deadline - now
