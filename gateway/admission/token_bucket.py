"""A token bucket that several gateways share.

Each gateway has the whole bucket. What it takes itself leaves it at once; what others take leaves it when they report
it, about once a second. So every amount is counted once, and what was taken too much is paid back before anything else
is given.

Over any window of t seconds no more is taken than `burst + rate * t`. With g gateways that report every s seconds,
`(g - 1) * (burst + rate * s)` more can be taken once, not again and again.
"""


class TokenBucket:
    """One gateway's view of a bucket. Times are monotonic seconds.

    Attributes:
        rate_per_s: What flows in.
        burst: What it holds at most.
        taken: What this gateway has taken since `full_at`, less what was returned.
        full_at: When it was full last, and the other gateways knew all that was taken.
    """

    def __init__(self, rate_per_s: float, burst: float, now: float) -> None:
        self.rate_per_s, self.burst = rate_per_s, burst
        self.taken, self.full_at = 0.0, now
        self._level = burst
        self._level_at = now
        self._reported = 0.0
        """What was reported of `taken`."""

    def level(self, now: float) -> float:
        """Return what can be taken now; below 0 too much was taken."""
        if now > self._level_at:
            self._level = min(self.burst, self._level + self.rate_per_s * (now - self._level_at))
            self._level_at = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount`, at most the burst, can be taken; 0 if it can be now."""
        missing = min(amount, self.burst) - self.level(now)
        # Rounding must not refuse what is exactly there.
        return 0.0 if missing <= 1e-9 * self.burst else missing / self.rate_per_s

    def take(self, amount: float, now: float) -> None:
        """Take `amount` (negative to return some), whether it is there or not."""
        self.taken_elsewhere(amount, now)
        self.taken += amount

    def taken_elsewhere(self, amount: float, now: float) -> None:
        """Let `amount` leave the bucket: another gateway has taken it."""
        self._level = min(self.burst, self.level(now) - amount)

    def change(self, rate_per_s: float, burst: float, now: float) -> None:
        """Use another rate and burst from now on; what was taken stays taken."""
        self._level = self.level(now) + burst - self.burst
        self.rate_per_s, self.burst = rate_per_s, burst

    def report(self, now: float) -> float | None:
        """Return `taken` for the other gateways; None, and begin a new period, once they know all and it is full."""
        if self.taken == self._reported and self.level(now) >= self.burst:
            self.taken, self._reported, self.full_at = 0.0, 0.0, now
            return None
        self._reported = self.taken
        return self.taken
