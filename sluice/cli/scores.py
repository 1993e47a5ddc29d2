"""Adds up graded answers: one line per model, kind and level, and one for each model as a whole."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

_T = TypeVar("_T")

ALL: Final = "all"
HEADERS: Final = ("model", "kind", "level", "n", "right", "tokens", "mean ms", "tiers")


@dataclass(frozen=True, slots=True)
class Result:
    """One question to one model; `error` says why there is no answer, latency is seconds."""

    model: str
    kind: str
    level: str
    right: bool = False
    tier: str = ""
    tokens: int = 0
    latency_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """The results of one cell, or of a whole model where kind and level are "all"."""

    model: str
    kind: str
    level: str
    results: tuple[Result, ...]

    @property
    def right_share(self) -> float:
        """Right answers of all questions; without an answer it is not right."""
        return sum(result.right for result in self.results) / len(self.results)

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(result.tokens for result in self.results)

    @property
    def mean_latency_ms(self) -> float | None:
        """Of those that were answered; None when none was."""
        times = [result.latency_s for result in self.results if not result.error]
        return sum(times) / len(times) * 1000 if times else None

    @property
    def tiers(self) -> dict[str, int]:
        """How many answers each tier gave."""
        names = [result.tier for result in self.results if not result.error]
        return {name: names.count(name) for name in sorted(set(names))}

    def cells(self) -> tuple[str, ...]:
        """The line of the table, under `HEADERS`."""
        mean_ms = self.mean_latency_ms
        return (
            self.model,
            self.kind,
            self.level,
            str(len(self.results)),
            f"{self.right_share:.1%}",
            str(self.tokens),
            "-" if mean_ms is None else f"{mean_ms:.0f}",
            " ".join(f"{tier}:{count}" for tier, count in self.tiers.items()),
        )

    def described(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "model": self.model,
            "kind": self.kind,
            "level": self.level,
            "n": len(self.results),
            "right_share": self.right_share,
            "tokens": self.tokens,
            "mean_latency_ms": self.mean_latency_ms,
            "tiers": self.tiers,
            "errors": sum(bool(result.error) for result in self.results),
        }


def tabulate(results: Sequence[Result]) -> list[Score]:
    """The scores: model by model in the order of the results, cell by cell, then the whole model."""
    table = []
    for model in _in_order(result.model for result in results):
        mine = [result for result in results if result.model == model]
        for kind, level in _in_order((result.kind, result.level) for result in mine):
            cell = (result for result in mine if (result.kind, result.level) == (kind, level))
            table.append(Score(model, kind, level, tuple(cell)))
        table.append(Score(model, ALL, ALL, tuple(mine)))
    return table


def _in_order(items: Iterable[_T]) -> list[_T]:
    return list(dict.fromkeys(items))
