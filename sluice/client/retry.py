"""Decide whether and when to retry: bounded tries, growing waits with jitter, never past the deadline.

A refusal for lack of capacity that says when to retry is not counted while there is a deadline: the request waits here
as it would wait in the mesh. A tenant's limits and budgets are final.

Nothing here reads a clock: `now` is monotonic time in seconds, and `dice` returns random numbers in [0, 1).
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
        start_tries: Most calls until a gateway accepts the request, if no error says when to retry.
        resume_tries: Most calls in a row without a new token, once the request was accepted or an error says when to
            retry. By default the last call starts about 17 s after the first failure, so that a gateway can restart.
        first_wait_s: Longest wait before the second call, in seconds. It doubles with each call.
        wait_s_max: Longest wait, in seconds, unless an error says to wait longer.
        start_s: Time after the first call during which others may start, until the request is accepted, in seconds;
            None for no bound. It matters where connection attempts take long.
    """

    start_tries: int = 16
    resume_tries: int = 16
    first_wait_s: float = 0.1
    wait_s_max: float = 2.0
    start_s: float | None = None

    def wait_s(self, failures: int, dice: float) -> float:
        """Return the wait after `failures` failures in a row, in seconds; half of it is random."""
        step = min(self.wait_s_max, self.first_wait_s * 2.0 ** (failures - 1))
        return step * (0.5 + dice / 2)


class Retries:
    """The retries of one request, which began at `now` and has a deadline unless `timeout_s` is None."""

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
        """Handle an event: new tokens reset the count of failures, `Started` allows more tries."""
        if isinstance(event, Started):
            self._tries, self._accepted = self._policy.resume_tries, True
        elif isinstance(event, Delta):
            self._failures = 0

    def progressed(self) -> None:
        """Handle progress of a stream without tokens: the request is accepted, and the count of failures is reset."""
        self._tries, self._failures, self._accepted = self._policy.resume_tries, 0, True

    def wait_s_after(self, error: SluiceError, now: float) -> float:
        """Return the wait before the next call, in seconds.

        Raises:
            SluiceError: `error` itself, if there is no next call: it is final, the tries or `start_s` are used up, or
                the deadline would pass first.
        """
        # Lack of room is not a failure: wait as long as the deadline allows, spread over time.
        if self._is_refusal(error):
            self._refusals += 1
            spread_s = (error.retry_after_s or 0.0) * self._dice() / 2
            return self._before_deadline(error, self._refusals, spread_s, now)
        self._failures += 1
        # A mesh that says when to retry is running, and expects to serve the request then.
        tries = self._tries if error.retry_after_s is None else self._policy.resume_tries
        is_late = self._start_until is not None and not self._accepted and now >= self._start_until
        if not may_resume(error) or self._failures >= tries or is_late:
            raise error
        return self._before_deadline(error, self._failures, 0.0, now)

    def _is_refusal(self, error: SluiceError) -> bool:
        """Return whether the mesh refused a request for lack of capacity and said when to retry."""
        refused = isinstance(error, Overloaded) and error.retry_after_s is not None
        return refused and self._deadline is not None and not self._accepted

    def _before_deadline(
        self, error: SluiceError, failures: int, spread_s: float, now: float
    ) -> float:
        step_s = self._policy.wait_s(failures, self._dice())
        wait_s = max(step_s, (error.retry_after_s or 0.0) + spread_s)
        # The next try would come too late: tell the caller now.
        if self._deadline is not None and now + wait_s >= self._deadline:
            raise error
        return wait_s

    def timeout_s(self, now: float) -> float | None:
        """Return the time left until the deadline, in seconds; None without one.

        Raises:
            DeadlinePassed: No time is left. (gRPC's asyncio calls take a timeout of 0 for no timeout.)
        """
        if self._deadline is None:
            return None
        if now >= self._deadline:
            raise DeadlinePassed("the deadline has passed")
        return self._deadline - now
