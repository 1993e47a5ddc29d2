"""`sluice eval`: accuracy, cost and latency of each model on graded questions, through the whole mesh."""

import asyncio
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from cli import options, output
from cli.commands import Group
from cli.failure import CommandFailed
from cli.files import NewFile
from cli.golden import evaluate_golden
from cli.questions import (
    Question,
    Result,
    Split,
    ask_all,
    of_file,
    support_questions,
    tabulate,
    trades,
)
from cli.target import target_of
from sluice.client import AsyncClient, GenerateOptions
from sluice.defaults import AUTO


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """Which questions are asked."""

    n: int = Option(20, help="Questions per kind and level.", min=1)
    seed: int = Option(1, help="Random seed for choosing the questions.")
    questions: Path | None = Option(None, help="JSONL or CSV questions to ask.", metavar="FILE")

    def load(self, side: Split) -> list[Question]:
        """Load the questions of the file, or generate support tasks of `side`."""
        if self.questions is not None:
            return of_file(self.questions)
        return support_questions(side, self.n, self.seed)

    def described(self) -> dict[str, Any]:
        """Return what `--json` prints of the questions."""
        if self.questions is not None:
            return {"questions": str(self.questions)}
        return {"n": self.n, "seed": self.seed}


@dataclass(frozen=True, kw_only=True)
class OutcomeOptions:
    """Which two models are compared, and where their outcomes go."""

    outcomes: Path | None = Option(None, help="Write outcomes for training.", metavar="FILE.csv")
    weak: str = Option("small", help="Small model of the outcomes.", metavar="NAME")
    strong: str = Option("large", help="Large model, the yardstick.", metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class GoldenOptions:
    """References, and what is compared with them."""

    golden: Path | None = Option(None, help="Score answers against references.", metavar="FILE")
    compare: tuple[str, str] | None = Option(
        None, help="--golden: two models or files.", metavar="A B"
    )
    floor: list[str] | None = Option(
        None, help="--golden: minimum of exact, f1, bleu or rouge_l.", metavar="METRIC=X"
    )


def _greedy(
    label: options.Label = None,
    accept_replace: bool = Option(
        False, "--accept-replace", help="Allow cascades to replace streamed text."
    ),
    timeout: float = Option(120.0, help="Timeout of each request, in seconds.", metavar="SECONDS"),
) -> GenerateOptions:
    options.check_timeout(timeout)
    return {
        "temperature": 0.0,
        "priority": "standard",
        "timeout_s": timeout,
        "labels": options.labels_of(label),
        "accept_replace": accept_replace,
    }


def evaluate(
    *,
    source: QuestionOptions,
    model: list[str] | None = Option(
        None, "--model", "-m", help='[default: every model, and "auto"]', metavar="NAME"
    ),
    pair: OutcomeOptions,
    references: GoldenOptions,
    generate_options: Annotated[GenerateOptions, Group(_greedy)],
    concurrency: int = Option(16, help="Number of questions asked at the same time.", min=1),
    tenant: options.Tenant = None,
    address: options.Address = None,
) -> None:
    """Grade models on questions: right answers, cost, latency.

    It also prints what routing saves.

    The shipped questions are held-out support tasks, which the tiers were not trained on. With --outcomes they are
    from the training side, so that a router that learns from them can be evaluated on the held-out ones. They are asked
    in a mixed order, answered greedily, graded exactly, and shown per model, kind and level. Tokens are those of
    prompts and answers, by the model that computed them. With --golden the answers are scored against references, and
    the exit code is 1 when a score is under its --floor.
    """
    outcomes = pair.outcomes
    if outcomes is not None and (model or pair.weak == pair.strong):
        raise CommandFailed("USAGE", "--outcomes asks --weak and --strong, two models")
    if (golden := references.golden) is not None:
        systems = references.compare or model or [AUTO]
        floors = references.floor or ()
        with options.connect(tenant, address) as client:
            evaluate_golden(golden, systems, floors, client, concurrency, generate_options)
        return
    if references.compare or references.floor:
        raise CommandFailed("USAGE", "--compare and --floor belong to --golden")
    questions, about = source.load("heldout" if outcomes is None else "train"), source.described()
    for number, question in enumerate(questions if outcomes else (), 1):
        if not isinstance(question.prompt, str):
            message = f"question {number}: outcomes are of prompts that are texts"
            raise CommandFailed("BAD_QUESTIONS", message)
    ask = partial(_ask, address, tenant, questions, concurrency, generate_options)
    if outcomes is None:
        results = asyncio.run(ask(model or []))
    else:
        with NewFile(outcomes) as file:
            results = asyncio.run(ask([pair.weak, pair.strong]))
            rows = write_outcomes(
                file, questions, results[: len(questions)], results[len(questions) :]
            )
        about |= {"outcomes": str(outcomes), "rows": rows}
    _show(results, about, pair.strong)


def write_outcomes(
    new: NewFile, questions: Sequence[Question], weak: Sequence[Result], strong: Sequence[Result]
) -> int:
    """Write training data for `sluice router train`: a row for each question that both models answered.

    Returns how many; without any there is no file.
    """
    rows = [
        (q.prompt_id, q.prompt, int(w.right), int(s.right), w.text)
        for q, w, s in zip(questions, weak, strong, strict=True)
        if not w.error and not s.error
    ]
    if rows:
        columns = ("prompt_id", "prompt", "weak", "strong", "weak_response")
        csv.writer(new).writerows([columns, *rows])
        new.complete()
    return len(rows)


async def _ask(
    address: str | None,
    tenant: str | None,
    questions: Sequence[Question],
    concurrency: int,
    generate_options: GenerateOptions,
    model_names: Sequence[str],
) -> list[Result]:
    """Ask one model after the other, so that models do not slow each other down."""
    results: list[Result] = []
    async with AsyncClient(**target_of(address).options(tenant)) as client:
        models = model_names or [*(m.name for m in await client.list_models()), AUTO]
        for model in models:
            to_model: GenerateOptions = {**generate_options, "model": model}
            results += await ask_all(client, model, questions, concurrency, to_model)
    return results


def _show(results: Sequence[Result], about: dict[str, Any], strong: str) -> None:
    table = tabulate(results)
    compared = trades(table, strong)

    def write() -> None:
        output.write_records(table, keys=3)
        if compared:
            print()
            output.write_records(compared)
        if about.get("rows"):
            print(f"{about['outcomes']}: {about['rows']} rows")

    failed = None
    if errors := [result.error for result in results if result.error]:
        message = f"{len(errors)} of {len(results)} questions got no answer: {errors[0]}"
        failed = ("UNANSWERED", message)
    output.show({**about, "scores": table, "trades": compared}, write, failed)
