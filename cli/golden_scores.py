"""Scores of answers against references: exact match, F1, BLEU, ROUGE-L, with bootstrap intervals and a paired test.

Exact match and F1 are those of SQuAD (Rajpurkar et al., 2016): lower case, without punctuation and English articles, F1
over words. BLEU is that of sacrebleu for the whole set, ROUGE-L the F-measure of rouge-score; all are from 0 to 1. With
several references the best one counts. Intervals are percentiles of a bootstrap over items, 95 %.
"""

import random
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

METRICS: Final = ("exact", "f1", "bleu", "rouge_l")
RESAMPLES: Final = 1000

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)
_TAIL: Final = 0.025


@dataclass(frozen=True, slots=True)
class Interval:
    """A score, and between which bounds it lies with 95 %."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Difference:
    """The second system's score less the first one's; `p` is two-sided: how often chance alone makes as much."""

    value: float
    low: float
    high: float
    p: float


class Scored:
    """The answers of one system, scored.

    Args:
        answers: one for each item.
        references: of each item, at least one.
    """

    def __init__(self, answers: Sequence[str], references: Sequence[Sequence[str]]) -> None:
        from rouge_score.rouge_scorer import RougeScorer
        from sacrebleu.metrics.bleu import BLEU

        pairs = list(zip(answers, references, strict=True))
        rouge = RougeScorer(["rougeL"])
        self._items: Mapping[str, list[float]] = {
            "exact": [best(exact, *pair) for pair in pairs],
            "f1": [best(f1, *pair) for pair in pairs],
            "rouge_l": [rouge.score_multi(found, one)["rougeL"].fmeasure for one, found in pairs],
        }
        # sacrebleu wants as many references for each item; None stands for one that is not there.
        most = max(map(len, references))
        streams: Any = [
            [refs[k] if k < len(refs) else None for refs in references] for k in range(most)
        ]
        self._bleu: Any = BLEU()
        # The statistics of each item, by which sacrebleu itself resamples.
        self._ngrams = self._bleu._extract_corpus_statistics(list(answers), streams)
        self.count = len(pairs)

    def score(self, metric: str, at: Sequence[int] | None = None) -> float:
        """Of the items ``at`` these places, or of all."""
        if metric == "bleu":
            kept = self._ngrams if at is None else [self._ngrams[one] for one in at]
            return float(self._bleu._aggregate_and_compute(kept).score) / 100
        values = self._items[metric]
        kept_values = values if at is None else [values[one] for one in at]
        return sum(kept_values) / len(kept_values)

    def interval(self, metric: str) -> Interval:
        """The score with its interval."""
        found = sorted(self.score(metric, at) for at in resamples(self.count))
        low, high = bounds(found)
        return Interval(self.score(metric), low, high)


def difference(first: Scored, second: Scored, metric: str) -> Difference:
    """What the second system does better, by a paired bootstrap (Koehn, 2004): both get the same items each time."""
    value = second.score(metric) - first.score(metric)
    found = sorted(
        second.score(metric, at) - first.score(metric, at) for at in resamples(first.count)
    )
    low, high = bounds(found)
    # Shifted so that there is no difference: how often it is as large as the observed one.
    as_large = sum(abs(one - value) >= abs(value) for one in found)
    return Difference(value, low, high, (as_large + 1) / (len(found) + 1))


def resamples(count: int) -> list[list[int]]:
    """Places of items, drawn with replacement; always the same ones."""
    dice = random.Random(0)
    return [dice.choices(range(count), k=count) for _ in range(RESAMPLES)]


def bounds(found: Sequence[float]) -> tuple[float, float]:
    """Where the middle 95 % of sorted values begins and ends."""
    cut = int(_TAIL * len(found))
    return found[cut], found[-1 - cut]


def best(score: Callable[[str, str], float], answer: str, references: Sequence[str]) -> float:
    """The score against the reference that it is the highest for."""
    return max(score(answer, reference) for reference in references)


def exact(answer: str, reference: str) -> float:
    """1 when they are the same words, else 0."""
    return float(words(answer) == words(reference))


def f1(answer: str, reference: str) -> float:
    """The harmonic mean of precision and recall of the words."""
    got, wanted = words(answer), words(reference)
    if not got or not wanted:
        return float(got == wanted)
    common = sum((Counter(got) & Counter(wanted)).values())
    return 2 * common / (len(got) + len(wanted))


def words(text: str) -> list[str]:
    """As SQuAD compares them."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
