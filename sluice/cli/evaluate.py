"""`sluice eval`: how well each model answers held-out questions of the support desk, through the whole mesh."""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli import failure, options, output, scores
from sluice.client.aio import AsyncClient
from sluice.defaults import AUTO
from sluice.errors import SluiceError

if TYPE_CHECKING:
    from model_workers.desk.example import Example


def evaluate(
    n: Annotated[int, typer.Option("--n", min=1, help="Questions per kind and level.")] = 20,
    seed: Annotated[int, typer.Option(help="Chooses the questions.")] = 1,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME",
            help='May be repeated.  [default: every model, and "auto"]',
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Questions that are asked at once.")] = 16,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Deadline of each answer.")
    ] = 120.0,
    address: options.Address = options.ADDRESS,
    as_json: options.Json = False,
) -> None:
    """Ask held-out questions and print how many answers are right.

    The questions are none that the shipped tiers were trained on. They are answered greedily, graded exactly, and shown
    per model, kind and level with the tokens and the mean latency of an answer.
    """
    from model_workers.desk.tasks import heldout

    examples = heldout(n, seed)
    results = asyncio.run(_ask_all(address, model or [], examples, concurrency, timeout))
    _write(results, {"n": n, "seed": seed}, as_json)


def _write(results: Sequence[scores.Result], about: dict[str, Any], as_json: bool) -> None:
    table = scores.tabulate(results)
    done = {**about, "scores": [score.described() for score in table]}
    if not as_json:
        output.write_table(scores.HEADERS, [score.cells() for score in table])
    if errors := [result.error for result in results if result.error]:
        message = f"{len(errors)} of {len(results)} questions got no answer: {errors[0]}"
        raise failure.CommandFailed("UNANSWERED", message, done)
    if as_json:
        output.write_json(done)


async def _ask_all(
    address: str,
    wanted: Sequence[str],
    examples: "Sequence[Example]",
    concurrency: int,
    timeout_s: float,
) -> list[scores.Result]:
    room = asyncio.Semaphore(concurrency)
    async with AsyncClient(address) as client:
        models = wanted or [*(m.name for m in await client.list_models()), AUTO]

        async def ask(model: str, example: "Example") -> scores.Result:
            async with room:
                return await _ask(client, model, example, timeout_s)

        return await asyncio.gather(*(ask(m, e) for m in models for e in examples))


async def _ask(
    client: AsyncClient, model: str, example: "Example", timeout_s: float
) -> scores.Result:
    began = time.monotonic()
    try:
        answer = await client.generate(
            example.prompt,
            model=model,
            max_tokens=example.max_tokens,
            temperature=0.0,
            priority="standard",
            timeout_s=timeout_s,
        ).answer()
    except SluiceError as error:
        return scores.Result(model, example.kind, example.level, error=f"{error.reason}: {error}")
    return scores.Result(
        model,
        example.kind,
        example.level,
        right=example.grade(answer.text),
        tier=answer.tier,
        tokens=answer.usage.completion_tokens,
        latency_s=time.monotonic() - began,
    )
