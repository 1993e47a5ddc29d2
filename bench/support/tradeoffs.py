"""Accuracy, tokens, cost and latency of routing strategies, from the graded answers of interleaved rounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Final

import numpy as np

from cli.questions import ALL, Result, score_of, trade

if TYPE_CHECKING:
    from matplotlib.axes import Axes


DRAWS: Final = 2_000
HEADERS: Final = (
    *("strategy", "right", "of large's (95 %)", "large's tokens", "answer tokens alone"),
    *("cost", "escalated", "TTFT mean / p50 / p95 ms", "latency mean / p50 / p95 ms"),
)

Rounds = Sequence[Sequence[Result]]


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds: medians over rounds."""

    mean: float
    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """One strategy.

    Attributes:
        accuracy: right answers of all questions.
        accuracy_share: of those of the strong model alone, on the same questions.
        accuracy_band: what 95 % of bootstrap draws of the questions give for it.
        token_share: tokens of prompts and answers that the strong model computed, of those that it computes alone.
        answer_token_share: the same without prompts.
        cost: of 1,000 questions.
        ttft: until the first text came, which a cascade may take back.
    """

    strategy: str
    accuracy: float
    accuracy_share: float
    accuracy_band: tuple[float, float]
    token_share: float
    answer_token_share: float
    cost: float
    escalated_share: float
    ttft: Times
    latency: Times


def tradeoffs(
    rounds: Mapping[str, Rounds], strong: str, prices: Mapping[str, float]
) -> list[Tradeoff]:
    """One for each strategy; all have answered the same questions.

    Args:
        strong: the strategy that is the strong model alone.
        prices: by model, per million tokens.

    Raises:
        ValueError: a question got no answer, or the strong model got none right.
    """
    alone = _results(rounds[strong], strong)
    if not any(result.right for result in alone):
        raise ValueError(f"{strong} got no answer right")
    return [_tradeoff(name, found, strong, alone, prices) for name, found in rounds.items()]


def table(found: Sequence[Tradeoff]) -> str:
    """The table of the documentation."""
    lines = [HEADERS, ("---",) * len(HEADERS), *(_cells(one) for one in found)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _tradeoff(
    name: str, rounds: Rounds, strong: str, alone: list[Result], prices: Mapping[str, float]
) -> Tradeoff:
    results = _results(rounds, name)
    score = score_of(name, ALL, ALL, results)
    beside = trade(score, score_of(strong, ALL, ALL, alone))
    assert beside.right_share is not None
    assert beside.token_share is not None
    assert beside.answer_token_share is not None
    cost = sum(prices[model] * count for model, count in score.tokens.items()) / 1e6
    return Tradeoff(
        name,
        score.right_share,
        beside.right_share,
        _band(results, alone),
        beside.token_share,
        beside.answer_token_share,
        cost / len(results) * 1_000,
        score.escalated_share,
        _times(rounds, lambda result: result.ttft_s),
        _times(rounds, lambda result: result.latency_s),
    )


def _results(rounds: Rounds, name: str) -> list[Result]:
    results = [result for round_ in rounds for result in round_]
    error = next((result.error for result in results if result.error), None)
    if error:
        raise ValueError(f"{name}: {error}")
    return results


def _band(results: Sequence[Result], alone: Sequence[Result]) -> tuple[float, float]:
    """Questions are drawn again, with the answers of both to each."""
    right = np.array(
        [(ours.right, theirs.right) for ours, theirs in zip(results, alone, strict=True)]
    )
    drawn = np.random.default_rng(0).integers(len(right), size=(DRAWS, len(right)))
    ours, theirs = right[drawn].sum(axis=1).T
    low, high = np.quantile(ours / np.maximum(theirs, 1), (0.025, 0.975))
    return float(low), float(high)


def _times(rounds: Rounds, pick: Callable[[Result], float]) -> Times:
    each = [sorted(pick(result) * 1_000 for result in round_) for round_ in rounds]
    return Times(
        median(fmean(ms) for ms in each),
        median(median(ms) for ms in each),
        median(float(np.quantile(ms, 0.95)) for ms in each),
    )


def _cells(one: Tradeoff) -> tuple[str, ...]:
    low, high = one.accuracy_band
    return (
        one.strategy,
        f"{one.accuracy:.1%}",
        f"{one.accuracy_share:.1%} ({low:.1%} to {high:.1%})",
        f"{one.token_share:.1%}",
        f"{one.answer_token_share:.1%}",
        f"{one.cost:.4f}",
        f"{one.escalated_share:.0%}",
        _shown(one.ttft),
        _shown(one.latency),
    )


def _shown(times: Times) -> str:
    return f"{times.mean:.0f} / {times.p50:.0f} / {times.p95:.0f}"


MARKERS: Final = "os^Dv<>pXPhd*"
CLOSE_PERCENT: Final = 93.0
"""Strategies that keep more are shown once more, larger."""


def draw(found: Sequence[Tradeoff], accuracy_min: float, tokens_max: float, path: Path) -> None:
    """Two panels as a PNG at ``path``. Needs matplotlib (extra `plots`)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _quality(left, found, accuracy_min, tokens_max)
    left.set(
        xlabel="tokens computed by the large tier, % of large alone",
        ylabel="right answers, % of large alone",
        title="What is kept (green: the target; bars: 95 % of bootstrap draws)",
        xlim=(-4, 104),
    )
    closer = left.inset_axes((0.36, 0.06, 0.62, 0.62))
    near = [one for one in found if 100 * one.accuracy_share >= CLOSE_PERCENT]
    _quality(closer, found, accuracy_min, tokens_max)
    lows = [100 * one.accuracy_band[0] for one in near]
    closer.set(xlim=(20, 55), ylim=(min([*lows, 98.5]) - 0.3, 102))
    _price(right, found)
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False
    )
    figure.savefig(path, dpi=130)


def _quality(
    axes: "Axes", found: Sequence[Tradeoff], accuracy_min: float, tokens_max: float
) -> None:
    target = (-4, 100 * tokens_max)
    axes.fill_between(target, 100 * accuracy_min, 104, alpha=0.12, color="green", linewidth=0)
    for at, one in enumerate(found):
        low, high = one.accuracy_band
        share = 100 * one.accuracy_share
        axes.errorbar(
            100 * one.token_share,
            share,
            yerr=[[max(0.0, share - 100 * low)], [max(0.0, 100 * high - share)]],
            marker=MARKERS[at % len(MARKERS)],
            fillstyle="none",
            markersize=8,
            linestyle="",
            linewidth=1,
            capsize=3,
            label=one.strategy,
            color=f"C{at}",
        )
    axes.set_ylim(None, 104)
    axes.grid(alpha=0.3)


def _price(axes: "Axes", found: Sequence[Tradeoff]) -> None:
    longest = max(one.latency.p95 for one in found)
    for at, one in enumerate(found):
        middle, late = one.latency.p50, one.latency.p95
        axes.barh(at, middle, color=f"C{at}", alpha=0.6)
        axes.plot((middle, late), (at, at), color=f"C{at}", marker="|")
        axes.plot(one.ttft.p50, at, marker="o", color="black", markersize=4)
        axes.text(1.04 * longest, at, f"{one.cost:.4f}", va="center", fontsize=9)
    axes.set_yticks(range(len(found)), [one.strategy for one in found])
    axes.invert_yaxis()
    axes.set(
        xlabel="ms (bar: latency p50, line: to p95, dot: TTFT p50)",
        title="What it costs (at the right: price of 1,000 questions)",
        xlim=(0, 1.2 * longest),
    )
    axes.grid(axis="x", alpha=0.3)
