"""The questions of `sluice eval`: loads them from the support tasks or a CSV file, and asks them."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final, Literal

from cli.failure import CommandFailed
from cli.files import open_table
from cli.scores import Result
from sluice.client import AnswerBuilder, AsyncClient, Delta, GenerateOptions, ModelUsage
from sluice.client.batch import all_aio
from sluice.errors import SluiceError

Split = Literal["train", "heldout"]

OWN_KIND: Final = "own"
_REQUIRED: Final = ("prompt", "answer")
_FIRST_ROW: Final = 2


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt whose answer can be graded; kind and level name its row in the table of scores."""

    prompt_id: str
    kind: str
    level: str
    prompt: str
    grade: Callable[[str], bool]
    max_tokens: int | None = None


def support_questions(split: Split, n: int, seed: int) -> list[Question]:
    """``n`` tasks of every kind and level, from one side of the split that the shipped tiers were trained with."""
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
    """The rows of a CSV file: prompt, answer, and optionally prompt_id, kind, level, max_tokens.

    An answer is right when it equals that of the row, white space at both ends aside.

    Raises:
        CommandFailed: the file cannot be read, or a row cannot be asked; the message names it.
    """
    with open_table(path) as (columns, rows):
        missing = [column for column in _REQUIRED if column not in columns]
        if missing:
            raise _bad(f"{path.name} row 1: no column {', '.join(missing)}")
        questions = list(_read(path.name, rows))
    if not questions:
        raise _bad(f"{path.name}: no questions")
    return questions


async def ask_all(
    client: AsyncClient,
    asked: str,
    questions: Sequence[Question],
    concurrency: int,
    options: GenerateOptions,
) -> list[Result]:
    """The results of all ``questions`` in their order, ``concurrency`` of them at a time.

    They are asked in a shuffled order, always the same: real traffic is not sorted by kind, which batches would notice.

    Args:
        asked: what the results are listed under.
    """
    order = list(range(len(questions)))
    Random(0).shuffle(order)

    async def ask(place: int) -> Result:
        return await _ask(client, asked, questions[order[place]], options)

    found = dict(zip(order, await all_aio(ask, len(order), concurrency), strict=True))
    return [found[at] for at in range(len(questions))]


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
        legs=answer.attempts or (ModelUsage(answer.model, answer.usage),),
        text=answer.text,
        ttft_s=latency_s if ttft_s is None else ttft_s,
        latency_s=latency_s,
    )


def _read(name: str, rows: Iterable[Mapping[str, str | None]]) -> Iterator[Question]:
    seen: set[str] = set()
    for row, cells in enumerate(rows, _FIRST_ROW):
        question = _question(f"{name} row {row}", str(row - 1), cells)
        if question.prompt_id in seen:
            raise _bad(f"{name} row {row}: prompt_id {question.prompt_id!r} comes twice")
        seen.add(question.prompt_id)
        yield question


def _question(place: str, default_id: str, cells: Mapping[str, str | None]) -> Question:
    for column in _REQUIRED:
        if not (cells.get(column) or "").strip():
            raise _bad(f"{place}: {column} is empty")
    expected = (cells["answer"] or "").strip()
    most = cells.get("max_tokens") or ""
    if most and not (most.isascii() and most.isdigit() and int(most) > 0):
        raise _bad(f"{place}: max_tokens is {most!r}, not a number of tokens")
    return Question(
        cells.get("prompt_id") or default_id,
        cells.get("kind") or OWN_KIND,
        cells.get("level") or "-",
        cells["prompt"] or "",
        lambda text: text.strip() == expected,
        int(most) if most else None,
    )


def _bad(message: str) -> CommandFailed:
    return CommandFailed("BAD_QUESTIONS", message)
