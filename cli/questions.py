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
from typing import Any, Final, Literal, TypeVar

from cli.failure import CommandFailed
from cli.files import open_table
from sluice.client import AnswerBuilder, AsyncClient, Delta, GenerateOptions, Message, ModelUsage
from sluice.client.batch import all_aio
from sluice.errors import SluiceError

_T = TypeVar("_T")

ALL: Final = "all"


@dataclass(frozen=True, slots=True)
class Result:
    """One question to one model.

    Attributes:
        asked: the model of the request, or what the results are listed under.
        model: whose answer it is.
        legs: tokens of every model that worked on it.
        ttft_s: until the first text came, which a cascade in mode "replace" may take back.
        error: the reason for a missing answer.
    """

    asked: str
    kind: str
    level: str
    right: bool = False
    model: str = ""
    legs: tuple[ModelUsage, ...] = ()
    text: str = ""
    ttft_s: float = 0.0
    latency_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """The results of one cell, or of a whole model where kind and level are "all", as they are printed with --json.

    Attributes:
        model: that was asked.
        n: questions.
        right_share: right answers of all questions; without an answer it is not right.
        tokens: of prompts and answers, by the model that computed them.
        answer_tokens: of answers alone; also those that no caller saw.
        answers: how many are of each model.
        escalated_share: of the questions whose answer was escalated to another model.
        ttft_ms, latency_ms: percentiles of the questions that have an answer.
    """

    model: str
    kind: str
    level: str
    n: int
    right_share: float
    tokens: Mapping[str, int]
    answer_tokens: Mapping[str, int]
    answers: Mapping[str, int]
    escalated_share: float
    ttft_ms: Mapping[str, float | None]
    latency_ms: Mapping[str, float | None]
    errors: int


def score_of(model: str, kind: str, level: str, results: Sequence[Result]) -> Score:
    """Return the sums of `results`."""
    tokens, answer_tokens = Counter[str](), Counter[str]()
    for leg in (leg for one in results for leg in one.legs):
        answer_tokens[leg.model] += leg.usage.completion_tokens
        tokens[leg.model] += leg.usage.completion_tokens + leg.usage.prompt_tokens
    answered = [one for one in results if not one.error]
    return Score(
        model=model,
        kind=kind,
        level=level,
        n=len(results),
        right_share=fmean(result.right for result in results),
        tokens=dict(tokens),
        answer_tokens=dict(answer_tokens),
        answers=dict(Counter(result.model for result in answered)),
        escalated_share=fmean(len(result.legs) > 1 for result in results),
        ttft_ms=_times_ms(result.ttft_s for result in answered),
        latency_ms=_times_ms(result.latency_s for result in answered),
        errors=len(results) - len(answered),
    )


@dataclass(frozen=True, slots=True)
class Trade:
    """A model, or routing, compared with the strong model alone on the same questions; None where that had nothing.

    Attributes:
        right_share: its right answers, of the strong model's.
        token_share: tokens of prompts and answers that the strong model computes for it, of those that it computes
            alone.
        answer_token_share: the same, of answers alone.
    """

    model: str
    strong: str
    right_share: float | None
    token_share: float | None
    answer_token_share: float | None


def trade(score: Score, alone: Score) -> Trade:
    """Compare `score` with `alone`, the strong model on the same questions."""
    strong = alone.model
    return Trade(
        score.model,
        strong,
        _share(score.right_share, alone.right_share),
        _share(score.tokens.get(strong, 0), alone.tokens.get(strong, 0)),
        _share(score.answer_tokens.get(strong, 0), alone.answer_tokens.get(strong, 0)),
    )


def trades(table: Sequence[Score], strong: str) -> list[Trade]:
    """Compare every model with `strong`; return an empty list if that was not asked."""
    whole = [score for score in table if score.kind == ALL]
    alone = next((score for score in whole if score.model == strong), None)
    if alone is None:
        return []
    return [trade(score, alone) for score in whole if score is not alone]


def tabulate(results: Sequence[Result]) -> list[Score]:
    """Return the scores: model by model in the order of the results, cell by cell, then the whole model."""
    table = []
    for asked in _in_order(result.asked for result in results):
        mine = [result for result in results if result.asked == asked]
        for kind, level in _in_order((result.kind, result.level) for result in mine):
            cell = [result for result in mine if (result.kind, result.level) == (kind, level)]
            table.append(score_of(asked, kind, level, cell))
        table.append(score_of(asked, ALL, ALL, mine))
    return table


def _in_order(items: Iterable[_T]) -> list[_T]:
    return list(dict.fromkeys(items))


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
    """`n` tasks of every kind and level, from one side of the split that the shipped tiers were trained with."""
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
        CommandFailed: the file cannot be read, or a question cannot be asked; the message names it.
    """
    found: dict[str, Question] = {}
    for place, number, row in rows_of(path):
        question = _question(place, number, row)
        if question.prompt_id in found:
            raise _bad(
                f"{place}: id {question.prompt_id!r} is not unique; give each question its own id"
            )
        found[question.prompt_id] = question
    if not found:
        raise _bad(f"{path.name}: no questions; the file needs at least one")
    return [*found.values()]


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
    asked: str,
    questions: Sequence[Question],
    concurrency: int,
    options: GenerateOptions,
) -> list[Result]:
    """Ask all `questions`, `concurrency` at a time, and return the results in their order.

    They are asked in a shuffled order, always the same: real traffic is not sorted by kind, which batches would notice.
    Results are listed under `asked`.
    """
    order = list(range(len(questions)))
    Random(0).shuffle(order)

    async def ask(place: int) -> Result:
        return await _ask(client, asked, questions[order[place]], options)

    results = dict(zip(order, await all_aio(ask, len(order), concurrency), strict=True))
    return [results[at] for at in range(len(questions))]


async def _ask(
    client: AsyncClient, asked: str, question: Question, options: GenerateOptions
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
        return Result(asked, question.kind, question.level, error=f"{error.reason}: {error}")
    latency_s = time.monotonic() - began
    answer = builder.build()
    return Result(
        asked,
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
    given = next((row[name] for name in _REFERENCES if row.get(name)), None)
    listed = given if isinstance(given, list) else [given]
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
