"""Asks graded questions, some at a time."""

import asyncio
import time
from collections.abc import Sequence
from random import Random

from sluice.cli.questions import Question
from sluice.cli.scores import Result
from sluice.client.aio import AsyncClient
from sluice.client.answer import Answer, AnswerBuilder, Delta, ModelUsage
from sluice.client.request import GenerateOptions
from sluice.errors import SluiceError


async def ask_all(
    client: AsyncClient,
    asked: str,
    questions: Sequence[Question],
    concurrency: int,
    options: GenerateOptions,
) -> list[Result]:
    """The results of all ``questions`` in their order, ``concurrency`` of them at a time.

    They are asked in a mixed order, always the same: callers do not come sorted by kind, and a mesh does not answer
    them as if they did.

    Args:
        asked: what the results are listed under.
    """
    order = list(range(len(questions)))
    Random(0).shuffle(order)
    room = asyncio.Semaphore(concurrency)
    found: dict[int, Result] = {}

    async def ask(at: int) -> None:
        async with room:
            found[at] = await _ask(client, asked, questions[at], options)

    await asyncio.gather(*(ask(at) for at in order))
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
        legs=_legs(answer),
        text=answer.text,
        ttft_s=latency_s if ttft_s is None else ttft_s,
        latency_s=latency_s,
    )


def _legs(answer: Answer) -> tuple[ModelUsage, ...]:
    return answer.attempts or (ModelUsage(answer.model, answer.usage),)
