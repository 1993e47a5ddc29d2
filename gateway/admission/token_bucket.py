"""A token bucket that several gateways share.

Each gateway has the whole bucket: what it takes itself leaves it at once, what others take when they tell it, about
once a second. So every amount is counted once, and what was taken too much is paid back before anything else is given.

Over any window of t seconds no more is taken than ``burst + rate * t``, and with g gateways that tell each other every
s seconds ``(g - 1) * (burst + rate * s)`` more once, not again and again.
"""


class TokenBucket:
    """One gateway's view of a bucket. Time is ``now``, monotonic seconds.

    Attributes:
        taken: what this gateway has taken since ``full_at``, less what was returned.
        full_at: when it was full last, and the other gateways knew all that was taken.
    """

    def __init__(self, rate_per_s: float, burst: float, now: float) -> None:
        self.rate_per_s, self.burst = rate_per_s, burst
        self.taken, self.full_at = 0.0, now
        self._level = burst
        self._at = now
        self._told = 0.0
        """Of what was taken."""

    def level(self, now: float) -> float:
        """What can be taken now; below 0 too much was."""
        if now > self._at:
            self._level = min(self.burst, self._level + self.rate_per_s * (now - self._at))
            self._at = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """How long until ``amount``, at most the burst, can be taken; 0: now."""
        missing = min(amount, self.burst) - self.level(now)
        # Rounding must not refuse what is exactly there.
        return 0.0 if missing <= 1e-9 * self.burst else missing / self.rate_per_s

    def take(self, amount: float, now: float) -> None:
        """Takes ``amount``, negative to return some, whether it is there or not."""
        self.taken_elsewhere(amount, now)
        self.taken += amount

    def taken_elsewhere(self, amount: float, now: float) -> None:
        """Another gateway has taken ``amount``."""
        self._level = min(self.burst, self.level(now) - amount)

    def change(self, rate_per_s: float, burst: float, now: float) -> None:
        """Another rate and burst from now on; what was taken stays taken."""
        self._level = self.level(now) + burst - self.burst
        self.rate_per_s, self.burst = rate_per_s, burst

    def tell(self, now: float) -> float | None:
        """What the others should know that was taken since ``full_at``; None: nothing, which ends the period."""
        if self.taken == self._told and self.level(now) >= self.burst:
            self.taken, self._told, self.full_at = 0.0, 0.0, now
            return None
        self._told = self.taken
        return self.taken
