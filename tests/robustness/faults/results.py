"""What callers saw of a fault, and what is counted of it. docs/concepts/faults.md explains each figure.

A call is compared with the answer that its question got on a calm mesh:

- answer: the call ended with Finished, and tokens and text are those of the calm answer;
- different: the call ended with Finished or failed, and its tokens or text are not the calm answer or the head of it;
- lost: it ended with OK but without Finished or with only the head of the calm answer, or it did not end at all within
  the caller's limit (hung; counted in lost, and named);
- doubled: a token came again: the index of a delta was below the number of tokens that the caller had;
- failed: it ended with an error; the reason is ``CODE/REASON`` of ErrorInfo, ``CODE/transport`` without one.

The gap of a call is its longest time between two events: the call itself, what the stream brought, its end. ``gap_max``
is the longest of all calls, ``gap_p99`` the 99th percentile over calls.

The rate is tokens a second of all callers. The calm rate is that before the first fault. After a fault the rate counts
as fallen when a window of `WINDOW_S` brings under half of the calm rate, and as full at the begin of the first window
after that which brings `FULL` of it. A rate that never fell was full all the time (0 s).

A core without a clock: times are monotonic seconds.
"""

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

BUCKET_S: Final = 0.1
WINDOW_S: Final = 1.0
FALLEN: Final = 0.5
FULL: Final = 0.8
WORST_KEPT: Final = 5
HUNG: Final = "hung"


@dataclass(frozen=True)
class Expected:
    """The answer of a calm mesh."""

    token_ids: tuple[int | None, ...]
    text: str


@dataclass
class Call:
    """One call, as its caller saw it.

    Attributes:
        finished: Finished has come.
        failure: why it ended with an error; None when it did not.
        gap_at: the begin of its longest gap.
    """

    question: int
    begun: float
    request_id: str = ""
    token_ids: list[int | None] = field(default_factory=list)
    text: str = ""
    finished: bool = False
    doubled: bool = False
    failure: str | None = None
    gap_s: float = 0.0
    gap_at: float = 0.0
    last: float = 0.0

    def __post_init__(self) -> None:
        self.last = self.gap_at = self.begun

    def event(self, now: float) -> None:
        """Something came, or the call ended."""
        if now - self.last > self.gap_s:
            self.gap_s, self.gap_at = now - self.last, self.last
        self.last = now

    def delta(self, index: int, token_ids: Sequence[int | None], text: str) -> None:
        """Tokens came; what the caller has already is left out."""
        known = len(self.token_ids) - index
        if known > 0 and token_ids:
            self.doubled = True
            token_ids = token_ids[known:]
        self.token_ids += token_ids
        self.text += text

    def verdict(self, expected: Expected) -> str:
        """ "answer", "different", "lost" or "failed"."""
        held, whole = tuple(self.token_ids), expected.token_ids
        if held != whole[: len(held)]:
            return "different"
        if self.failure is not None:
            return "lost" if self.failure == HUNG else "failed"
        if not self.finished or len(held) < len(whole):
            return "lost"
        return "answer" if self.text == expected.text else "different"


@dataclass(frozen=True)
class WorstCall:
    """A call with a long gap, to look for in the logs; ``at_s`` is the begin of the gap, seconds of the run."""

    request_id: str
    gap_s: float
    at_s: float
    end: str


@dataclass(frozen=True)
class Line:
    """What one kind of fault did; times in seconds."""

    fault: str
    faults: int
    answers: int
    different: int
    lost: int
    hung: int
    doubled: int
    failed: Mapping[str, int]
    gap_max_s: float
    gap_p99_s: float
    calm_tokens_per_s: float
    full_rate_p50_s: float | None
    full_rate_max_s: float | None
    worst: Sequence[WorstCall]
    notes: Sequence[str] = ()

    @property
    def exact(self) -> bool:
        """Whether every answer is the calm one."""
        return not (self.different or self.lost or self.doubled)


class Tally:
    """Counts the calls of one run."""

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.verdicts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.doubled = 0
        self._gaps = array("d")
        self._worst: list[WorstCall] = []
        self._buckets: Counter[int] = Counter()

    def tokens(self, count: int, now: float) -> None:
        """So many tokens reached a caller."""
        self._buckets[int((now - self.begun) / BUCKET_S)] += count

    def add(self, call: Call, expected: Expected) -> None:
        """The call has ended."""
        verdict = call.verdict(expected)
        self.verdicts[verdict] += 1
        self.doubled += call.doubled
        if call.failure is not None:
            self.failures[call.failure] += 1
        self._gaps.append(call.gap_s)
        end = verdict if call.failure is None else f"{verdict}: {call.failure}"
        self._worst.append(WorstCall(call.request_id, call.gap_s, call.gap_at - self.begun, end))
        # What is not the calm answer comes first: it is what one looks for.
        self._worst.sort(key=lambda worst: (worst.end == "answer", -worst.gap_s))
        del self._worst[WORST_KEPT:]

    def rate(self, start: float, end: float) -> float:
        """Tokens a second between two times."""
        first, last = (int((at - self.begun) / BUCKET_S) for at in (start, end))
        return sum(self._buckets[at] for at in range(first, last)) / max(end - start, BUCKET_S)

    def full_rate_after(self, fault_at: float, until: float, calm: float) -> float:
        """Seconds from a fault until the rate is full again; infinite when it is not before ``until``."""
        fallen, start = False, fault_at
        while start + WINDOW_S <= until:
            rate = self.rate(start, start + WINDOW_S)
            if fallen and rate >= FULL * calm:
                return start - fault_at
            fallen = fallen or rate < FALLEN * calm
            start += BUCKET_S
        return math.inf if fallen else 0.0

    def line(
        self,
        fault: str,
        fault_times: Sequence[float],
        calm_from: float,
        end: float,
        notes: Sequence[str] = (),
    ) -> Line:
        """The figures of the run.

        Args:
            fault_times: when each fault began.
            calm_from: from here to the first fault the mesh was calm and warm.
            end: until then callers began new calls.
        """
        calm = self.rate(calm_from, fault_times[0] if fault_times else end)
        full = sorted(
            self.full_rate_after(at, until, calm) for at, until in pairwise([*fault_times, end])
        )
        return Line(
            fault=fault,
            faults=len(fault_times),
            answers=self.verdicts["answer"],
            different=self.verdicts["different"],
            lost=self.verdicts["lost"],
            hung=self.failures[HUNG],
            doubled=self.doubled,
            failed={why: n for why, n in sorted(self.failures.items()) if why != HUNG},
            gap_max_s=max(self._gaps, default=0.0),
            gap_p99_s=_percentile(sorted(self._gaps), 0.99),
            calm_tokens_per_s=calm,
            full_rate_p50_s=_finite(_percentile(full, 0.5)),
            full_rate_max_s=_finite(_percentile(full, 1.0)),
            worst=tuple(self._worst),
            notes=tuple(notes),
        )


def _percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of all do not exceed; 0 of none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def _finite(seconds: float) -> float | None:
    """JSON has no infinity."""
    return seconds if math.isfinite(seconds) else None


HEADER: Final = (
    f"{'fault':24} {'n':>3} {'answers':>8} {'diff':>5} {'lost':>5} {'twice':>5}"
    f" {'failed':>6} {'gap max':>8} {'p99':>7} {'full rate p50':>13} {'max':>7}"
)


def shown(line: Line) -> str:
    """One line for people, and more for the reasons of failures and what the faults have to say."""
    first = (
        f"{line.fault:24} {line.faults:>3} {line.answers:>8,} {line.different:>5} {line.lost:>5} {line.doubled:>5}"
        f" {sum(line.failed.values()):>6} {line.gap_max_s:>6.1f} s {line.gap_p99_s:>5.2f} s"
        f" {_seconds(line.full_rate_p50_s):>13} {_seconds(line.full_rate_max_s):>7}"
    )
    reasons = [f"{count} {why}" for why, count in line.failed.items()]
    reasons += [f"{line.hung} hung"] if line.hung else []
    more = [", ".join(reasons)] if reasons else []
    return "\n    ".join([first, *more, *line.notes])


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"
