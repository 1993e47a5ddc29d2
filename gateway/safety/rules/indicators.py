"""Scores of the indicators of prompt injection: several that stand near each other weigh together."""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.safety.findings import BY_PLACE, Finding, Severity

NEAR_CHARS: Final = 400
"""Distance within which indicators count together, in characters."""
MENTION_DISCOUNT: Final = 2
"""Weight that an indicator loses if it is only mentioned."""

_MENTION_CHARS: Final = 120
_OPENING_QUOTES: Final = frozenset("\"'“”„«‘‚`‹「『")
_MENTION: Final = re.compile(
    r"(?<!\w)(?:prompt.injections?|jailbreak(?:s|ing)?|attack(?:s|ers?)?|adversarial|phrases?|such as|e\.g\."
    r"|for example|examples?|detect(?:s|ion|ing)?|red.team(?:ing)?|blog post|paper|researchers?|wrote|written|called"
    r"|angriff(?:e|en)?|zum beispiel|z\. ?b\.|attaques?|par exemple|ataques?|por ejemplo)(?!\w)",
    re.IGNORECASE,
)
_LADDER: Final = (
    (5, Severity.CRITICAL),
    (3, Severity.HIGH),
    (2, Severity.MEDIUM),
    (0, Severity.LOW),
)


@dataclass(frozen=True, slots=True)
class Indicator:
    """A scored form that matched."""

    rule: str
    start: int
    end: int
    weight: int


def weight_at(text: str, start: int, weight: int) -> int:
    """Return the weight of an indicator at `start`, less its discount if it is only mentioned."""
    before = text[max(0, start - _MENTION_CHARS) : start]
    if before.rstrip()[-1:] in _OPENING_QUOTES or _MENTION.search(before):
        return max(1, weight - MENTION_DISCOUNT)
    return weight


def judge(indicators: Sequence[Indicator]) -> Iterator[Finding]:
    """Yield one finding per indicator, with the severity of its neighbourhood. Linear but for the sort."""
    ordered = sorted(indicators, key=BY_PLACE)
    near: deque[Indicator] = deque()
    ahead = iter(ordered)
    waiting = next(ahead, None)
    for indicator in ordered:
        while waiting is not None and waiting.start <= indicator.end + NEAR_CHARS:
            near.append(waiting)
            waiting = next(ahead, None)
        # A window slides along, so each indicator enters and leaves it once.
        while near and near[0].start < indicator.start - NEAR_CHARS:
            near.popleft()
        yield Finding(indicator.rule, indicator.start, indicator.end, _severity(near))


def _severity(near: deque[Indicator]) -> Severity:
    heaviest: dict[str, int] = {}
    for indicator in near:
        heaviest[indicator.rule] = max(indicator.weight, heaviest.get(indicator.rule, 0))
    score = sum(heaviest.values())
    return next(severity for least, severity in _LADDER if score >= least)
