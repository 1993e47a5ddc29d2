"""Cost and quality of routing decisions.

`routed_accuracy_share` and `large_token_share`: the shipped tiers on the held-out tasks of `sluice eval`, through the
embedded mesh, with every strategy of bench/support/strategies.py. The plain names are of the learned cascade.
`decision_p99_ms`: the learned router on one core, from the text of a prompt of 1 kB to its score, features included.
`prompts_apgr` and others, with --outcomes: quality on recorded outcomes by repeated cross-validation, beside a router
that goes by the length of the prompt; `cascade_...` where the rows have the small model's answers.

    python bench/router.py [--json] [--runs N] [--tiers] [--n N] [--plot FILE.png] [--decision]
        [--outcomes FILE] [--folds N]

Without --tiers, --decision and --outcomes: tiers and decision.
"""

import argparse
import csv
import gzip
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Final

import numpy as np
import uvloop
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.safety import CORPORA, prompts
from bench.support import tier_runs, tradeoff_plot
from bench.support.harness import MIN_RUNS, Figure, emit, machine, run_count
from bench.support.tradeoffs import Tradeoff, table
from gateway.routing.learned.model import (
    LearnedRouter,
    Trees,
    answer_example,
    mean_of,
    prompt_example,
)
from learning import outcomes, report
from learning.outcomes import Outcome
from learning.train import train

BOUND_MS: Final = 0.3
SIZE_BYTES: Final = 1_000
COUNT: Final = 1_000
LEARN_FROM: Final = 1_500

Scores = NDArray[np.float64]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=run_count, default=MIN_RUNS)
    parser.add_argument("--outcomes", type=Path)
    parser.add_argument("--folds", type=int, default=10)
    parser.add_argument("--decision", action="store_true", help="what a decision costs")
    parser.add_argument("--tiers", action="store_true", help="the shipped tiers, by strategy")
    parser.add_argument("--n", type=int, default=20, help="tasks per kind, level and round")
    parser.add_argument("--plot", type=Path, help="a picture of the strategies")
    options = parser.parse_args()
    everything = not (options.decision or options.tiers or options.outcomes)
    figures = []
    if options.decision or everything:
        figures.append(decision(options.runs))
    if options.outcomes:
        figures += quality(options.outcomes, options.folds, options.runs)
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
        tradeoff_plot.draw(found, tier_runs.ACCURACY_MIN, tier_runs.TOKENS_MAX, picture)


def decision(runs: int) -> Figure:
    """The median over runs of the 99th percentile of the worst corpus."""
    router = train(list(_made_up(LEARN_FROM)))
    by_corpus = {
        corpus: statistics.median(
            _p99_ms(router, list(islice(prompts(lines, SIZE_BYTES), COUNT))) for _ in range(runs)
        )
        for corpus, lines in CORPORA.items()
    }
    ours = max(by_corpus.values())
    each = ", ".join(f"{corpus} {ms:.3g}" for corpus, ms in by_corpus.items())
    (trees,) = (part for part in router.prompts.parts if isinstance(part, Trees))
    return Figure(
        "decision_p99_ms",
        ours,
        BOUND_MS,
        BOUND_MS / ours,
        "ms",
        runs,
        machine(),
        f"p99 of {COUNT} prompts of {SIZE_BYTES} bytes, features included; the peer is the bound; learned from "
        f"{LEARN_FROM} rows: {len(trees.roots)} trees, {len(trees.column)} nodes; {each}",
    )


def quality(path: Path, folds: int, runs: int) -> list[Figure]:
    """APGR, CPT50 and CPT80 over ``runs`` repeats of cross-validation; for cascades too where rows have answers."""
    with gzip.open(path, "rt", newline="") as file:
        rows = csv.DictReader(file)
        read = outcomes.gather([outcomes.Source(path.name, list(rows.fieldnames or ()), rows)])
    scored = [_held_out(read, folds, seed) for seed in range(runs)]
    return [
        _figure(head, name, read, [each[head] for each in scored], path.name)
        for head in scored[0]
        for name in ("apgr", "cpt50", "cpt80")
    ]


def _held_out(read: Sequence[Outcome], folds: int, seed: int) -> dict[str, Scores]:
    """By head: the score of each row from a router that has not seen it."""
    order = np.random.default_rng(seed).permutation(len(read))
    heads = ("prompts", "cascade") if all(row.answer for row in read) else ("prompts",)
    scores = {head: np.zeros(len(read)) for head in heads}
    for fold in range(folds):
        out = set(order[fold::folds].tolist())
        router = train([row for at, row in enumerate(read) if at not in out], seed)
        for at in out:
            row = read[at]
            # Before calibration, whose lines differ from fold to fold: pooled rows must be comparable.
            weak, strong = mean_of(router.prompts.parts, prompt_example(row.prompt)).tolist()
            scores["prompts"][at] = strong - weak
            if router.cascade is not None and row.answer is not None:
                example = answer_example(row.prompt, row.answer)
                weak, strong = mean_of(router.cascade.parts, example).tolist()
                scores["cascade"][at] = strong - weak
    return scores


def _figure(
    head: str, name: str, read: Sequence[Outcome], scores: Sequence[Scores], source: str
) -> Figure:
    weak = np.array([row.weak for row in read])
    strong = np.array([row.strong for row in read])
    values = [report.figures(report.trace(each, weak, strong))[name] for each in scores]
    lengths = np.array([len(row.prompt) for row in read], np.float64)
    peer = report.figures(report.trace(lengths, weak, strong))[name]
    ours = statistics.fmean(values)
    ratio = ours / peer if name == "apgr" else peer / ours
    spread = f"{min(values):.4g} to {max(values):.4g}"
    note = f"{source}, {len(read)} rows, {spread} over repeats; the peer is the prompt's length"
    unit = "" if name == "apgr" else "%"
    return Figure(f"{head}_{name}", ours, peer, ratio, unit, len(values), machine(), note)


def _made_up(count: int) -> Iterator[Outcome]:
    """Outcomes with a known structure, so that trees grow as deep as on recorded ones: hard where numbers are many."""
    rng = np.random.default_rng(0)
    lines = [line for corpus in CORPORA.values() for line in corpus]
    for row in range(count):
        words = " ".join(rng.permutation(lines)[: int(rng.integers(1, 6))].tolist()).split()
        text = " ".join(rng.permutation(words)[: int(rng.integers(10, 120))].tolist())
        hard = sum(character.isdigit() for character in text) / 20
        weak = float(rng.random() > min(0.9, hard))
        yield Outcome(str(row), text, weak, float(rng.random() < 0.9))


def _p99_ms(router: LearnedRouter, texts: Sequence[str]) -> float:
    """The 99th percentile of the time for one prompt, after a warm-up."""
    took = []
    for text in (*islice(cycle(texts), 50), *texts):
        start = time.perf_counter()
        router.score(text)
        took.append((time.perf_counter() - start) * 1000)
    return statistics.quantiles(took[50:], n=100)[98]


if __name__ == "__main__":
    main()
