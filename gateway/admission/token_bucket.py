"""A token bucket that several gateways share.

Each gateway has the whole bucket: what it takes itself leaves it at once, what others take when they tell it, about
once a second. So every amount is counted once, and what was taken too much is paid back before anything else is given.

Until the others tell what they take, each of them is left its share of the rate: its part of what all gateways were
asked for lately.

Over any window of t seconds no more is taken than ``burst + rate * t``, and with g gateways that tell each other every
s seconds ``(g - 1) * (burst + rate * s)`` more once, not again and again.
"""

import math
from dataclasses import dataclass
from typing import Final

DEMAND_S: Final = 5.0
"""What was asked for is forgotten with this time constant, seconds."""
STALE_S: Final = 3.5
"""A gateway that is silent for longer is gone, and its share is that of the others."""
_IDLE: Final = 1e-3


@dataclass
class _Peer:
    taken: float
    asked: float
    told_at: float


class TokenBucket:
    """One gateway's view of a bucket. Time is ``now``, monotonic seconds.

    Attributes:
        taken: what this gateway has taken since its start, less what was returned.
    """

    def __init__(self, rate_per_s: float, burst: float, now: float) -> None:
        self.rate_per_s, self.burst = rate_per_s, burst
        self.taken = 0.0
        self._level = burst
        self._asked = 0.0
        self._at = now
        self._peers: dict[str, _Peer] = {}

    def level(self, now: float) -> float:
        """What can be taken now; below 0 too much was."""
        self._advance(now)
        return self._level - self._left_to_others(now)

    def wait_s(self, amount: float, now: float) -> float:
        """How long until ``amount``, at most the burst, can be taken; 0: now."""
        missing = min(amount, self.burst) - self.level(now)
        # Rounding must not refuse what is exactly there.
        return 0.0 if missing <= 1e-9 * self.burst else missing / self.rate_per_s

    def asked(self, amount: float, now: float) -> None:
        """A request for ``amount`` came, whatever becomes of it."""
        self._advance(now)
        self._asked += amount

    def take(self, amount: float, now: float) -> None:
        """Takes ``amount``, negative to return some, whether it is there or not."""
        self._advance(now)
        self.taken += amount
        self._level = min(self.burst, self._level - amount)

    def change(self, rate_per_s: float, burst: float, now: float) -> None:
        """Another rate and burst from now on; what was taken stays taken."""
        self._advance(now)
        self._level += burst - self.burst
        self.rate_per_s, self.burst = rate_per_s, burst

    def tell(self, now: float) -> tuple[float, float]:
        """What this gateway has taken since its start, and what it was asked for lately."""
        self._advance(now)
        return self.taken, self._asked

    def told(
        self, gateway: str, taken: float, asked: float, now: float, *, is_new: bool = False
    ) -> None:
        """Another process has taken so much since its start, and was asked for so much lately.

        ``is_new``: it was not heard before, so what it took until now is not counted.
        """
        self._advance(now)
        known = self._peers.get(gateway)
        before = known.taken if known is not None else taken if is_new else 0.0
        self._level = min(self.burst, self._level - (taken - before))
        self._peers[gateway] = _Peer(taken, asked, now)

    @property
    def is_idle(self) -> bool:
        """Whether it is full, and nobody has asked for anything lately: a new one would be the same."""
        asked = self._asked + sum(peer.asked for peer in self._peers.values())
        return self._level >= self.burst and asked < _IDLE

    def _advance(self, now: float) -> None:
        if now <= self._at:
            return
        passed_s, self._at = now - self._at, now
        self._level = min(self.burst, self._level + self.rate_per_s * passed_s)
        faded = math.exp(-passed_s / DEMAND_S)
        self._asked *= faded
        for peer in self._peers.values():
            peer.asked *= faded
        if any(now - peer.told_at > STALE_S for peer in self._peers.values()):
            live = {name: p for name, p in self._peers.items() if now - p.told_at <= STALE_S}
            self._peers = live

    def _left_to_others(self, now: float) -> float:
        if not self._peers:
            return 0.0
        asked = self._asked + sum(peer.asked for peer in self._peers.values())
        if asked <= 1e-9:
            return 0.0
        return sum(
            self.rate_per_s * peer.asked / asked * (now - peer.told_at)
            for peer in self._peers.values()
        )
