"""The questions of `sluice eval`: where they come from, how they are asked, and what the answers add up to."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Final, Literal

from cli.failure import CommandFailed
from cli.files import open_table
from sluice.client import AnswerBuilder, AsyncClient, Delta, GenerateOptions, Message, ModelUsage
from sluice.client.batch import all_aio
from sluice.errors import SluiceError

ALL: Final = "all"


@dataclass(frozen=True, slots=True)
class Result:
    """One question to one model.

    Attributes:
        system: the model of the request, or what the results are listed under.
        model: whose answer it is.
        legs: tokens of every model that worked on it.
        ttft_s: until the first text came, which a cascade in mode "replace" may take back.
        error: the reason for a missing answer.
    """

    system: str
    kind: str
    level: str
    right: bool = False
    model: str = ""
    legs: tuple[ModelUsage, ...] = ()
    text: str = ""
    ttft_s: float = 0.0
    latency_s: float = 0.0
    error: str = ""


def score_of(model: str, kind: str, level: str, results: Sequence[Result]) -> dict[str, Any]:
    """Return the sums of the results of one cell, or of a whole model where kind and level are "all", as JSON.

    A question without an answer is not right. `tokens` are those of prompts and answers, `answer_tokens` also those of
    answers that no caller saw, both by the model that computed them. Times are percentiles of what was answered.
    """
    tokens, answer_tokens = Counter[str](), Counter[str]()
    for leg in (leg for one in results for leg in one.legs):
        answer_tokens[leg.model] += leg.usage.completion_tokens
        tokens[leg.model] += leg.usage.completion_tokens + leg.usage.prompt_tokens
    answered = [one for one in results if not one.error]
    return {
        "model": model,
        "kind": kind,
        "level": level,
        "n": len(results),
        "right_share": fmean(result.right for result in results),
        "answers": dict(Counter(result.model for result in answered)),
        "escalated_share": fmean(len(result.legs) > 1 for result in results),
        "tokens": dict(tokens),
        "answer_tokens": dict(answer_tokens),
        "ttft_ms": _times_ms(result.ttft_s for result in answered),
        "latency_ms": _times_ms(result.latency_s for result in answered),
        "errors": len(results) - len(answered),
    }


def trades(table: Sequence[Mapping[str, Any]], strong: str) -> list[dict[str, Any]]:
    """Compare every model, or routing, with `strong` alone on the same questions; empty if that was not asked.

    Shares are those of right answers and of the tokens that `strong` computes; None where it has nothing.
    """
    whole = {score["model"]: score for score in table if score["kind"] == ALL}
    alone = whole.pop(strong, None)
    if alone is None:
        return []
    return [
        {
            "model": model,
            "strong": strong,
            "right_share": _share(score["right_share"], alone["right_share"]),
            "token_share": _share(score["tokens"].get(strong, 0), alone["tokens"].get(strong, 0)),
            "answer_token_share": _share(
                score["answer_tokens"].get(strong, 0), alone["answer_tokens"].get(strong, 0)
            ),
        }
        for model, score in whole.items()
    ]


def tabulate(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the scores: model by model in the order of the results, cell by cell, then the whole model."""
    cells: dict[str, dict[tuple[str, str], list[Result]]] = {}
    for result in results:
        of_model = cells.setdefault(result.system, {})
        of_model.setdefault((result.kind, result.level), []).append(result)
    table = []
    for model, of_model in cells.items():
        table += [score_of(model, *cell, mine) for cell, mine in of_model.items()]
        table.append(score_of(model, ALL, ALL, [one for mine in of_model.values() for one in mine]))
    return table


def _times_ms(seconds: Iterable[float]) -> dict[str, float | None]:
    """Return percentiles by nearest rank, in milliseconds; None without a value."""
    ordered = sorted(1000 * second for second in seconds)
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    return {
        name: ordered[ceil(share * len(ordered)) - 1] if ordered else None
        for name, share in shares.items()
    }


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


Split = Literal["train", "heldout"]

_REFERENCES: Final = ("references", "reference", "answer")


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt whose answer can be graded.

    Attributes:
        kind, level: name its row in the table of scores.
        references: right answers; empty: `grade` alone knows.
    """

    prompt_id: str
    kind: str
    level: str
    prompt: str | list[Message]
    grade: Callable[[str], bool]
    max_tokens: int | None = None
    references: tuple[str, ...] = ()


def support_questions(split: Split, n: int, seed: int) -> list[Question]:
    """Return `n` tasks of every kind and level, from one side of the split that the shipped tiers were trained with."""
    from model_workers.tiers.example import CELLS
    from model_workers.tiers.tasks import generate

    return [
        Question(
            f"{split}-{seed}-{kind}-{level}-{number}",
            kind,
            level,
            example.prompt,
            example.grade,
            example.max_tokens,
        )
        for kind, level in CELLS
        for number, example in enumerate(generate(seed, n, (kind, level), split))
    ]


def of_file(path: Path) -> list[Question]:
    """Return the questions of a JSONL or CSV file.

    Each has "prompt" or "messages", "answer" or "reference" or a list of "references", and optionally "id", "kind",
    "level", "max_tokens". An answer is right when it equals a reference, white space at both ends aside.

    Raises:
        OSError: the file cannot be read.
        CommandFailed: it is no such file, or a question cannot be asked; the message names it.
    """
    questions: dict[str, Question] = {}
    for place, number, row in rows_of(path):
        question = _question(place, number, row)
        if question.prompt_id in questions:
            raise _bad(
                f"{place}: id {question.prompt_id!r} is not unique; give each question its own id"
            )
        questions[question.prompt_id] = question
    if not questions:
        raise _bad(f"{path.name}: no questions; the file needs at least one")
    return [*questions.values()]


def rows_of(path: Path) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Yield the objects of a JSONL file or the rows of a CSV file, each with its place and number.

    Raises:
        OSError: the file cannot be read.
        CommandFailed: it is no such file.
    """
    if ".csv" in path.suffixes:
        with open_table(path) as (_, rows):
            for number, cells in enumerate(rows, 1):
                yield f"{path.name} row {number + 1}", number, cells
        return
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise _bad(f"{path.name} line {number}: not a JSON object")
                    yield f"{path.name} line {number}", number, row
    except ValueError as error:
        raise _bad(f"{path} is not JSONL: {error}") from error


async def ask_all(
    client: AsyncClient,
    system: str,
    questions: Sequence[Question],
    concurrency: int,
    options: GenerateOptions,
) -> list[Result]:
    """Ask all `questions`, `concurrency` at a time, and return the results in their order.

    They are asked in a shuffled order, always the same: real traffic is not sorted by kind, which batches would notice.
    Results are listed under `system`.
    """
    order = list(range(len(questions)))
    Random(0).shuffle(order)

    async def ask(place: int) -> Result:
        return await _ask(client, system, questions[order[place]], options)

    results = dict(zip(order, await all_aio(ask, len(order), concurrency), strict=True))
    return [results[at] for at in range(len(questions))]


async def _ask(
    client: AsyncClient, system: str, question: Question, options: GenerateOptions
) -> Result:
    asking: GenerateOptions = {**options}
    if question.max_tokens is not None:
        asking["max_tokens"] = question.max_tokens
    builder, ttft_s, began = AnswerBuilder(), None, time.monotonic()
    try:
        async with client.generate(question.prompt, **asking) as stream:
            async for event in stream:
                builder.add(event)
                if ttft_s is None and isinstance(event, Delta):
                    ttft_s = time.monotonic() - began
    except SluiceError as error:
        return Result(system, question.kind, question.level, error=f"{error.reason}: {error}")
    latency_s = time.monotonic() - began
    answer = builder.build()
    return Result(
        system,
        question.kind,
        question.level,
        right=question.grade(answer.text),
        model=answer.model,
        legs=answer.attempts or (ModelUsage(model=answer.model, usage=answer.usage),),
        text=answer.text,
        ttft_s=latency_s if ttft_s is None else ttft_s,
        latency_s=latency_s,
    )


def _question(place: str, number: int, row: Mapping[str, Any]) -> Question:
    value = next((row[name] for name in _REFERENCES if row.get(name)), None)
    listed = value if isinstance(value, list) else [value]
    references = tuple(one for one in listed if isinstance(one, str) and one.strip())
    if not references or len(references) < len(listed):
        raise _bad(f"{place}: answer, reference or references is no text")
    most = str(row.get("max_tokens") or "")
    if most and not (most.isascii() and most.isdigit() and int(most) > 0):
        raise _bad(f"{place}: max_tokens is {most!r}, not a number of tokens")
    right = {reference.strip() for reference in references}
    return Question(
        next(
            (str(row[name]) for name in ("id", "custom_id", "prompt_id") if row.get(name)),
            str(number),
        ),
        row.get("kind") or "own",
        row.get("level") or "-",
        _prompt(place, row),
        lambda text: text.strip() in right,
        int(most) if most else None,
        references,
    )


def _prompt(place: str, row: Mapping[str, Any]) -> str | list[Message]:
    if isinstance(prompt := row.get("prompt"), str) and prompt.strip():
        return prompt
    try:
        return [Message(turn["role"], turn["content"]) for turn in row["messages"]]
    except (KeyError, TypeError) as error:
        raise _bad(f"{place}: has no prompt and no messages") from error


def _bad(message: str) -> CommandFailed:
    return CommandFailed("BAD_QUESTIONS", message)
