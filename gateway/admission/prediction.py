"""Predicts the time that an answer takes, of the lengths of earlier answers.

    total = wait for a worker + time to the first token + time for the other tokens

The length of an answer is the smaller of `max_tokens` and the median of earlier answers of the same model, tenant and
workload; it is at least `min_tokens`. While it is unknown only the first token is predicted: long answers of others say
nothing about a short one. Waits and speeds come from the batchers' reports, see `gateway.admission.overload`.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import Final, NamedTuple

from sluice.wire.subjects import CLASSES

ANSWERS_MIN: Final = 8
"""Answers of a kind that must have ended before their length is predicted."""
ANSWERS_MAX: Final = 64
"""Answers of a kind that are kept; the oldest is dropped first."""
KINDS_MAX: Final = 4096
"""Models, tenants and workloads that are kept; the oldest is dropped first."""


class AnswerKind(NamedTuple):
    """Answers of similar lengths."""

    model: str
    tenant: str
    workload: str


class AnswerLength(NamedTuple):
    """The expected length of an answer.

    Attributes:
        tokens: Its length.
        is_known: Whether that is the length; else it is the least.
    """

    tokens: int
    is_known: bool


@dataclass(frozen=True)
class ExpectedTime:
    """How long an answer is expected to take.

    Attributes:
        wait_s: Wait for a worker, in seconds.
        first_token_s: Then until the first token, in seconds.
        rest_s: Then until the last token that is predicted, in seconds.
        is_total: Whether that is the whole answer: its length and the speed of the workers are known.
        tokens_per_s: Rate of the workers while all their capacity is used; 0 if it is not, or unknown.
    """

    wait_s: float = 0.0
    first_token_s: float = 0.0
    rest_s: float = 0.0
    is_total: bool = False
    tokens_per_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of it, in seconds."""
        return self.wait_s + self.first_token_s + self.rest_s

    @property
    def tokens_before(self) -> float:
        """Tokens that the workers compute before this answer begins."""
        return self.wait_s * self.tokens_per_s


@dataclass
class _Answers:
    """Lengths of one kind of answers, each with whether the answer was cut there.

    Attributes:
        lengths: The latest lengths.
        median: Their median; None while they are too few.
    """

    lengths: deque[tuple[int, bool]] = field(default_factory=lambda: deque(maxlen=ANSWERS_MAX))
    median: tuple[int, bool] | None = None

    def add(self, tokens: int, *, is_cut: bool) -> None:
        # An answer that was cut below the median might have become longer than that, or not.
        if is_cut and self.lengths and tokens < median_low(self.lengths)[0]:
            return
        self.lengths.append((tokens, is_cut))
        if len(self.lengths) >= ANSWERS_MIN:
            self.median = median_low(self.lengths)


class AnswerLengths:
    """Lengths of earlier answers by kind."""

    def __init__(self) -> None:
        self._kinds: dict[AnswerKind, _Answers] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    def observe(self, kind: AnswerKind, tokens: int, *, is_cut: bool) -> None:
        """Add the length of an answer; `is_cut` says that it ended because it reached its `max_tokens`."""
        answers = self._kinds.get(kind)
        if answers is None:
            if len(self._kinds) >= KINDS_MAX:
                del self._kinds[next(iter(self._kinds))]
            answers = self._kinds[kind] = _Answers()
        answers.add(tokens, is_cut=is_cut)

    def expect(self, kind: AnswerKind, min_tokens: int, max_tokens: int) -> AnswerLength:
        """Return the expected length of an answer; `max_tokens` is 0 if it has no limit of its own."""
        least = max(1, min_tokens)
        if max_tokens and max_tokens <= least:
            return AnswerLength(least, is_known=True)
        answers = self._kinds.get(kind)
        if answers is None or answers.median is None:
            return AnswerLength(least, is_known=False)
        tokens, is_cut = answers.median
        if max_tokens and max_tokens <= tokens:
            return AnswerLength(max_tokens, is_known=True)
        return AnswerLength(max(least, tokens), is_known=not is_cut or tokens < least)


class SentTokens:
    """Tasks that this gateway has sent to a model since the batchers' reports, by class."""

    def __init__(self) -> None:
        self._sent: deque[tuple[float, int, str, float]] = deque()
        self._tasks = [0] * len(CLASSES)
        self._tokens = [0.0] * len(CLASSES)
        self._tenants: list[dict[str, float]] = [{} for _ in CLASSES]
        """Tokens of each tenant, by rank."""

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, rank: int, tenant: str, tokens: float, now: float, since: float) -> None:
        """Add a task of the class with `rank`; drop tasks that were sent until `since`."""
        self.forget(since)
        self._sent.append((now, rank, tenant, tokens))
        self._tasks[rank] += 1
        self._tokens[rank] += tokens
        tenants = self._tenants[rank]
        tenants[tenant] = tenants.get(tenant, 0.0) + tokens

    def forget(self, since: float) -> None:
        """Drop the tasks that were sent until `since`."""
        while self._sent and self._sent[0][0] <= since:
            _, rank, tenant, tokens = self._sent.popleft()
            self._tasks[rank] -= 1
            if not self._tasks[rank]:
                self._tokens[rank] = 0.0
                self._tenants[rank].clear()
                continue
            self._tokens[rank] -= tokens
            self._tenants[rank][tenant] -= tokens

    def tasks(self, rank: int) -> int:
        """Return the number of tasks of the class with `rank` or a more urgent one."""
        return sum(self._tasks[: rank + 1])

    def tokens_before(self, rank: int, tenant: str, weights: Mapping[str, float]) -> float:
        """Return the tokens that go before a new task of the class with `rank` and the tenant.

        These are the tokens of more urgent classes, and of its class the tenant's own with the fair share of others.
        """
        of_class, tenants = self._tokens[rank], self._tenants[rank]
        own, weight = tenants.get(tenant, 0.0), weights.get(tenant, 1.0)
        if own and own < of_class:
            all_weights = sum(weights.get(name, 1.0) for name, sent in tenants.items() if sent > 0)
            own *= all_weights / weight
        return sum(self._tokens[:rank]) + min(of_class, own)
