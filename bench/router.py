"""Cost and quality of routing decisions.

`routed_accuracy_share` and `large_token_share`: the shipped tiers on the held-out tasks of `sluice eval`, through the
embedded mesh, with every strategy of bench/support/tier_runs.py. The plain names are of the learned cascade.
`decision_p99_ms`: the learned router on one core, from the text of a prompt of 1 kB to its score, features included,
in processor time; the peer is the plainest learned router, words hashed into 32,768 buckets and one numpy dot
product, on the same prompts in turn.
`heldout_rules_accuracy_share`, `heldout_rules_token_share`: the shipped rule on seeds that it was not tuned on
(bench/support/heldout_rules.py).
`SOURCE_prompts_apgr` and others, with --outcomes: quality on recorded outcomes, over --runs draws. A draw holds out a
tenth of the rows (--folds) that the router has not learned from, every row once. The peer is a plain baseline that
learns from the same rows: logistic regression on hashed words and pairs of words of the prompt; for `cascade_...`,
where the rows have the small model's answers, of the answer. `also` has a router by the length of the prompt. Columns
of the answer and features of the prompt were chosen with a look at two of these sets (docs/concepts/routing.md), so on
them these figures are optimistic.

    python bench/router.py [--json] [--runs N] [--tiers] [--n N] [--plot FILE.png] [--decision] [--rules]
        [--outcomes FILE] [--folds N]

Without --tiers, --decision, --rules and --outcomes: the first three.
"""

import csv
import gzip
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import numpy as np
import uvloop
from numpy.typing import NDArray
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.linear_model import LogisticRegression

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.safety import CORPORA, prompts, quantiles_ms
from bench.support import heldout_rules, tier_runs
from bench.support.harness import Figure, emit, machine, options_of
from bench.support.tradeoffs import Tradeoff, draw, table
from gateway.routing.learned import answer
from gateway.routing.learned.features import HASHED, buckets
from gateway.routing.learned.model import Columns, Words
from learning import outcomes, report
from learning.outcomes import Outcome
from learning.train import train

SIZE_BYTES: Final = 1_000
COUNT: Final = 1_000
LEARN_FROM: Final = 1_500

Scores = NDArray[np.float64]
Sides = tuple[Scores, Scores]
"""Ours and the baseline's."""


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--outcomes", type=Path, action="append", default=[])
    parser.add_argument("--folds", type=int, default=10)
    parser.add_argument("--decision", action="store_true", help="what a decision costs")
    parser.add_argument("--rules", action="store_true", help="the shipped rule, held out")
    parser.add_argument("--tiers", action="store_true", help="the shipped tiers, by strategy")
    parser.add_argument("--n", type=int, default=20, help="tasks per kind, level and round")
    parser.add_argument("--plot", type=Path, help="a picture of the strategies")
    options = parser.parse_args()
    everything = not (options.decision or options.tiers or options.rules or options.outcomes)
    figures = []
    if options.decision or everything:
        figures.append(decision(options.runs))
    for path in options.outcomes:
        figures += quality(path, options.folds, options.runs)
    if options.rules or everything:
        figures += heldout_rules.figures(options.runs, options.n)
    if options.tiers or everything:
        found = uvloop.run(tier_runs.run(options.runs, options.n))
        figures += tier_runs.figures(found, options.runs, options.n)
        show(found, options.plot, options.json)
    emit(figures, options.json)


def show(found: Sequence[Tradeoff], picture: Path | None, as_json: bool) -> None:
    """The table of all strategies, and their picture."""
    if not as_json:
        print(table(found), end="\n\n")
    if picture is not None:
        draw(found, tier_runs.ACCURACY_MIN, tier_runs.TOKENS_MAX, picture)


def decision(runs: int) -> Figure:
    """The median over runs of the 99th percentile of the worst corpus."""
    router = train(list(_made_up(LEARN_FROM)))
    sides = (router.prompts.score, _dot_product)
    by_corpus = {
        corpus: quantiles_ms(sides, list(islice(prompts(lines, SIZE_BYTES), COUNT)), runs)
        for corpus, lines in CORPORA.items()
    }
    (p50, ours), (peer_p50, peer) = max(by_corpus.values(), key=lambda sides: sides[0][1])
    each = ", ".join(f"{corpus} {ms[0][1]:.3g}" for corpus, ms in by_corpus.items())
    return Figure(
        *("decision_p99_ms", ours, peer, peer / ours, "ms", runs, machine()),
        f"p99 of {COUNT} prompts of {SIZE_BYTES} bytes; peer: hashed words and a numpy dot product; {each}",
        {"rows": LEARN_FROM},
        {"p50_ms": p50, "peer_p50_ms": peer_p50},
    )


_WEIGHTS: Final = np.random.default_rng(0).normal(size=(HASHED, 2)).astype(np.float32)


def _dot_product(text: str) -> float:
    """The peer: each distinct word has a weight for either model."""
    counts = np.zeros(HASHED, np.float32)
    counts[[crc32(word.encode()) % HASHED for word in set(text.lower().split())]] = 1.0
    weak, strong = (counts @ _WEIGHTS).tolist()
    return float(strong - weak)


def quality(path: Path, folds: int, runs: int) -> list[Figure]:
    """APGR, CPT50 and CPT80 over ``runs`` repeats of cross-validation; for cascades too where rows have answers."""
    with gzip.open(path, "rt", newline="") as file:
        rows = csv.DictReader(file)
        read = outcomes.gather([outcomes.Source(path.name, list(rows.fieldnames or ()), rows)])
    scored = [_held_out(read, folds, seed) for seed in range(runs)]
    return [
        _figure(head, name, read, [each[head] for each in scored], path.name.split("_")[1])
        for head in scored[0]
        for name in ("apgr", "cpt50", "cpt80")
    ]


def _held_out(read: Sequence[Outcome], folds: int, seed: int) -> dict[str, Sides]:
    """By head: the score of each row, and the baseline's, from rows that are not its own."""
    order = np.random.default_rng(seed).permutation(len(read))
    heads = ("prompts", "cascade") if all(row.answer for row in read) else ("prompts",)
    scores = {head: (np.zeros(len(read)), np.zeros(len(read))) for head in heads}
    for fold in range(folds):
        out = order[fold::folds].tolist()
        seen = [row for at, row in enumerate(read) if at not in set(out)]
        router = train(seen, seed)
        unseen = [read[at] for at in out]
        for at in out:
            row = read[at]
            # Before calibration, whose lines differ from fold to fold: pooled rows must be comparable.
            scores["prompts"][0][at] = _gain(router.prompts.part, buckets(row.prompt))
            if router.cascade is not None and row.answer is not None:
                columns = answer.columns(row.prompt, row.answer)
                scores["cascade"][0][at] = _gain(router.cascade.part, columns)
        for head, (_, plain) in scores.items():
            plain[out] = _baseline(head, seen, unseen)
    return scores


def _gain(part: Words | Columns, example: NDArray[Any]) -> float:
    weak, strong = part.predict(example).tolist()
    return float(strong - weak)


def _baseline(head: str, seen: Sequence[Outcome], unseen: Sequence[Outcome]) -> Scores:
    """Logistic regressions of either model's outcome on hashed words and pairs of words."""
    words = HashingVectorizer(n_features=HASHED, ngram_range=(1, 2), norm="l2")
    texts = [
        words.transform([(row.answer or "") if head == "cascade" else row.prompt for row in rows])
        for rows in (seen, unseen)
    ]
    weak, strong = (
        _chances(texts, np.array([getattr(row, side) >= 0.5 for row in seen]))
        for side in ("weak", "strong")
    )
    return strong - weak


def _chances(texts: Sequence[Any], right: NDArray[np.bool_]) -> Scores:
    if right.all() or not right.any():
        return np.full(texts[1].shape[0], float(right.mean()))
    chances: Scores = (
        LogisticRegression(max_iter=1_000).fit(texts[0], right).predict_proba(texts[1])
    )
    return chances[:, 1]


def _figure(
    head: str, name: str, read: Sequence[Outcome], scores: Sequence[Sides], source: str
) -> Figure:
    def value(each: Scores) -> float:
        return report.figures(report.trace(each, weak, strong))[name]

    weak = np.array([row.weak for row in read])
    strong = np.array([row.strong for row in read])
    values = [value(ours) for ours, _ in scores]
    ours, peer = statistics.fmean(values), statistics.fmean(value(plain) for _, plain in scores)
    higher = name == "apgr"
    by_length = value(np.array([len(row.prompt) for row in read], np.float64))
    return Figure(
        *(f"{source}_{head}_{name}", ours, peer, ours / peer if higher else peer / ours),
        *("" if higher else "%", len(values), machine()),
        f"{len(read)} rows, {min(values):.4g} to {max(values):.4g} over draws; peer: regression on hashed words",
        {"rows": len(read)},
        {"by_length": by_length},
    )


def _made_up(count: int) -> Iterator[Outcome]:
    """Outcomes with a known structure, with as many words as recorded ones: hard where numbers are many."""
    rng = np.random.default_rng(0)
    lines = [line for corpus in CORPORA.values() for line in corpus]
    for row in range(count):
        words = " ".join(rng.permutation(lines)[: int(rng.integers(1, 6))].tolist()).split()
        text = " ".join(rng.permutation(words)[: int(rng.integers(10, 120))].tolist())
        hard = sum(character.isdigit() for character in text) / 20
        weak = float(rng.random() > min(0.9, hard))
        yield Outcome(str(row), text, weak, float(rng.random() < 0.9))


if __name__ == "__main__":
    main()
