"""`sluice eval --golden`: answers against references, of models or of files of earlier answers.

Exact match and F1 are those of SQuAD (Rajpurkar et al., 2016): lower case, without punctuation and English articles, F1
over words. BLEU is that of sacrebleu for the whole set, ROUGE-L the F-measure of rouge-score; all are from 0 to 1. With
several references the best one counts. Intervals are percentiles of a bootstrap over items, 95 %.
"""

import json
import random
import re
import string
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from cli import output
from cli.failure import CommandFailed
from cli.files import PIECE_BYTES
from cli.questions import Question, of_file, rows_of
from sluice.client import Client, GenerateOptions
from sluice.client.request import generate_request
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import duration

METRICS: Final = ("exact", "f1", "bleu", "rouge_l")
RESAMPLES: Final = 1000

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)
_TAIL: Final = 0.025
FEW_ITEMS: Final = 30
"""With fewer items an interval covers most of what is possible."""


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
            "rouge_l": [rouge.score_multi(truths, one)["rougeL"].fmeasure for one, truths in pairs],
        }
        # Corpus BLEU is computed from sums of n-gram counts. Count each item once, so that a
        # resample only adds counts. The effective order does not change counts; sacrebleu asks
        # for it with single sentences.
        sentence_bleu = BLEU(effective_order=True)
        self._bleu_counts = [
            sentence_bleu.sentence_score(answer, item_references)
            for answer, item_references in pairs
        ]
        self.count = len(pairs)

    def score(self, metric: str, at: Sequence[int] | None = None) -> float:
        """Return the score of the items `at` these places, by default of all."""
        places = range(self.count) if at is None else at
        if metric == "bleu":
            return _corpus_bleu([self._bleu_counts[place] for place in places])
        values = self._items[metric]
        return sum(values[place] for place in places) / len(places)

    def interval(self, metric: str) -> dict[str, float]:
        """Return the score with the bounds of its interval."""
        return _interval(self.score(metric), (self.score(metric, at) for at in _resamples(self)))


def _corpus_bleu(items: Sequence[Any]) -> float:
    """Return the BLEU, 0 to 1, of items that sacrebleu counted one by one."""
    from sacrebleu.metrics.bleu import BLEU

    correct = [sum(counts) for counts in zip(*(item.counts for item in items), strict=True)]
    total = [sum(counts) for counts in zip(*(item.totals for item in items), strict=True)]
    score = BLEU.compute_bleu(
        correct=correct,
        total=total,
        sys_len=sum(item.sys_len for item in items),
        ref_len=sum(item.ref_len for item in items),
        smooth_method="exp",
    )
    return score.score / 100


def difference(first: Scored, second: Scored, metric: str) -> dict[str, float]:
    """Compare two systems by a paired bootstrap (Koehn, 2004): both get the same items in each sample.

    `p` is two-sided: how often chance alone makes as much.
    """
    value = second.score(metric) - first.score(metric)
    drawn = [second.score(metric, at) - first.score(metric, at) for at in _resamples(first)]
    # Shifted so that there is no difference: how often it is as large as the observed one.
    as_large = sum(abs(one - value) >= abs(value) for one in drawn)
    return {**_interval(value, drawn), "p": (as_large + 1) / (len(drawn) + 1)}


def _resamples(scored: Scored) -> list[list[int]]:
    """Draw places of items with replacement, from a fixed seed."""
    dice, count = random.Random(0), scored.count
    return [dice.choices(range(count), k=count) for _ in range(RESAMPLES)]


def _interval(value: float, drawn: Iterable[float]) -> dict[str, float]:
    """Return a value with the bounds of the middle 95 % of `drawn`."""
    ordered = sorted(drawn)
    cut = int(_TAIL * len(ordered))
    return {"value": value, "low": ordered[cut], "high": ordered[-1 - cut]}


def best(score: Callable[[str, str], float], answer: str, references: Sequence[str]) -> float:
    """Return the score against the best reference."""
    return max(score(answer, reference) for reference in references)


def exact(answer: str, reference: str) -> float:
    """Return 1 if answer and reference have the same words, else 0."""
    return float(words(answer) == words(reference))


def f1(answer: str, reference: str) -> float:
    """Return the harmonic mean of precision and recall of the words."""
    answer_words, reference_words = words(answer), words(reference)
    if not answer_words or not reference_words:
        return float(answer_words == reference_words)
    common = sum((Counter(answer_words) & Counter(reference_words)).values())
    return 2 * common / (len(answer_words) + len(reference_words))


def words(text: str) -> list[str]:
    """Return the words of `text` as SQuAD compares them."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def evaluate_golden(
    path: Path,
    systems: Sequence[str],
    floors: Sequence[str],
    client: Client,
    concurrency: int,
    chosen: GenerateOptions,
) -> None:
    """Score each of `systems` (a model name, or a file of `sluice batch`); compare them when there are two.

    Raises:
        CommandFailed: a file or floor is malformed, a package is missing, something was not answered, or a score is
            under its floor.
        OSError: a file cannot be read.
        SluiceError: a job cannot be run.
    """
    bounds = dict(map(_floor, floors))
    if not (find_spec("sacrebleu") and find_spec("rouge_score")):
        message = "needs `pip install 'sacrebleu>=2.4,<3' 'rouge-score>=0.1.2'`"
        raise CommandFailed("NOT_INSTALLED", message)
    golden = of_file(path)
    references = [item.references for item in golden]
    scored: dict[str, Scored] = {}
    jobs: dict[str, str] = {}
    for system in systems:
        if Path(system).is_file():
            answers = _answers_of(Path(system), golden)
        else:
            jobs[system], answers = _ask(client, system, golden, concurrency, chosen)
        scored[system] = Scored(answers, references)
    described: dict[str, Any] = {
        "golden": str(path),
        "items": len(golden),
        "jobs": jobs,
        "scores": {
            name: {metric: one.interval(metric) for metric in METRICS}
            for name, one in scored.items()
        },
    }
    if len(systems) == 2:
        first, second = (scored[system] for system in systems)
        described["differences"] = {metric: difference(first, second, metric) for metric in METRICS}
    last, failed = described["scores"][systems[-1]], None
    if low := [name for name, bound in bounds.items() if last[name]["value"] < bound]:
        problems = ", ".join(f"{name} {last[name]['value']:.3f} < {bounds[name]:g}" for name in low)
        failed = ("BELOW_FLOOR", f"{systems[-1]}: {problems}")
    output.show(described, lambda: _write(described, systems), failed)


def _floor(text: str) -> tuple[str, float]:
    name, _, bound = text.partition("=")
    with suppress(ValueError):
        if name in METRICS:
            return name, float(bound)
    raise CommandFailed("USAGE", f"--floor {text!r} is not METRIC=0.8, of {', '.join(METRICS)}")


def _ask(
    client: Client,
    model: str,
    golden: Sequence[Question],
    concurrency: int,
    chosen: GenerateOptions,
) -> tuple[str, list[str]]:
    """Run a job that asks `model` and return its id and its answers."""
    lines = "".join(json.dumps(_line(item)) + "\n" for item in golden).encode()
    request = generate_request("-", {**chosen, "model": model})
    spec = pb.JobSpec(
        name=f"eval {model}"[:128],
        model=request.model,
        sampling=request.sampling,
        labels=dict(request.labels),
        priority=request.priority,
    )
    spec.limits.concurrency, spec.limits.max_bad_line_share = concurrency, 1.0
    if (timeout_s := chosen.get("timeout_s")) is not None:
        spec.limits.item_timeout.CopyFrom(duration(timeout_s * 1e3))
    sent = [lines[at : at + PIECE_BYTES] for at in range(0, len(lines), PIECE_BYTES)]
    spec.input.upload_id = client.jobs.upload("golden.jsonl", lambda: sent)
    job = client.jobs.create(spec, uuid.uuid4().hex)
    for now in client.jobs.watch(job.id, until_paused=True):
        job = now
    if job.state != pb.JOB_STATE_COMPLETED:
        raise CommandFailed(job.reason_code or "UNANSWERED", f"{job.id}: {job.reason}")
    results = list(client.jobs.results(job.id))
    if dead := [result for result in results if result.HasField("error")]:
        message = f"{len(dead)} of {len(golden)} questions got no answer ({job.id}): {dead[0].error.message}"
        raise CommandFailed("UNANSWERED", message)
    return job.id, [one.answer.text for one in results]


def _line(item: Question) -> dict[str, Any]:
    """Return a question as an item of a job."""
    line: dict[str, Any] = {"id": item.prompt_id}
    if item.max_tokens is not None:
        line["max_tokens"] = item.max_tokens
    if isinstance(item.prompt, str):
        return {**line, "prompt": item.prompt}
    turns = [{"role": turn.role, "content": turn.content} for turn in item.prompt]
    return {**line, "messages": turns}


def _answers_of(path: Path, golden: Sequence[Question]) -> list[str]:
    """Return the answers in a file that `sluice batch` wrote, in the order of `golden`."""
    texts: dict[str, str] = {}
    for _, _, line in rows_of(path):
        if (line.get("response") or {}).get("status_code") == 200:
            choice = line["response"]["body"]["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            texts[str(line["custom_id"])] = text
    if missing := [item.prompt_id for item in golden if item.prompt_id not in texts]:
        message = f"{path}: {len(missing)} of {len(golden)} items have no answer: {missing[0]!r}"
        raise CommandFailed("UNANSWERED", message)
    return [texts[item.prompt_id] for item in golden]


def _write(described: Mapping[str, Any], systems: Sequence[str]) -> None:
    rows = [{"model": system, **described["scores"][system]} for system in systems]
    if differences := described.get("differences"):
        rows.append({"model": f"{systems[1]} - {systems[0]}", **differences})
    output.write_records(rows, keys=1)
    if described["items"] < FEW_ITEMS:
        print(f"only {described['items']} items: the intervals say little; use {FEW_ITEMS} or more")
    for system, job in described["jobs"].items():
        print(f"the answers of {system} are kept: sluice batch results {job} --out FILE")
