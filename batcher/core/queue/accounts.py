"""Fair shares between the tenants of one class: start-time fair queueing, in tokens.

Every tenant has a virtual time: tokens it was given, divided by its weight. The one with the least goes next. A tenant
that has nothing waiting saves nothing up: when it comes back it starts where the others are. What a task costs is
estimated when it is handed out, and corrected when its answer has ended (P. Goyal, H. Vin, H. Cheng, "Start-time Fair
Queueing", 1996; for tokens of language models: Y. Sheng et al., "Fairness in Serving Large Language Models", 2024).
"""

from collections.abc import Mapping
from typing import Final

from batcher.core.queue.entries import Entry

IDLE_MIN: Final = 1024
"""So many tenants without anything waiting are no reason to clean up."""


class Account:
    """One tenant in one class.

    Attributes:
        time: virtual time, tokens by weight.
        waiting: its tasks that wait.
        tokens: of them, prompt and expected answer.
    """

    __slots__ = ("time", "tokens", "waiting", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.time = 0.0
        self.waiting = 0
        self.tokens = 0

    def charge(self, entry: Entry, tokens: int) -> None:
        """Makes ``tokens`` what ``entry`` has cost, whatever it was charged before."""
        self.time += (tokens - entry.charged) / self.weight
        entry.charged = tokens


class Accounts:
    """All tenants of one class.

    Attributes:
        time: virtual time of who was served last: where a tenant starts that had nothing waiting.
        weight: of all tenants with something waiting.
    """

    def __init__(self, weights: Mapping[str, float] | None) -> None:
        """``weights`` of tenants that differ from 1; None: tenants make no difference."""
        self.time = 0.0
        self.weight = 0.0
        self._weights = weights
        self._accounts: dict[str, Account] = {}
        self._clean_at = IDLE_MIN

    def of(self, tenant: str) -> Account:
        """The tenant's account."""
        key = tenant if self._weights is not None else ""
        account = self._accounts.get(key)
        return account if account is not None else self._open(key)

    def weight_of(self, tenant: str) -> float:
        """Its weight beside the others."""
        return self._weights.get(tenant, 1.0) if self._weights is not None else 1.0

    def known(self, tenant: str) -> Account | None:
        """The tenant's account, if there is one."""
        return self._accounts.get(tenant if self._weights is not None else "")

    def enters(self, account: Account) -> None:
        """Something of a tenant begins to wait that had nothing waiting."""
        account.time = max(account.time, self.time)
        self.weight += account.weight

    def leaves(self, account: Account) -> None:
        """Nothing of the tenant waits any more."""
        self.weight -= account.weight

    def _open(self, key: str) -> Account:
        if len(self._accounts) >= self._clean_at:
            self._forget_idle()
        account = self._accounts[key] = Account(self.weight_of(key))
        return account

    def _forget_idle(self) -> None:
        """Tenants behind the others start where they are anyway."""
        self._accounts = {
            key: account
            for key, account in self._accounts.items()
            if account.waiting or account.time > self.time
        }
        self._clean_at = 2 * len(self._accounts) + IDLE_MIN
