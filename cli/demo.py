"""`sluice demo`: routing, the crash of a worker and a trace, shown on a mesh that runs as long as the command.

The mesh serves the models of the configuration, the small one on two workers. Each of the three parts is a function of
a client: `answer_tasks`, `survive_crash` and `draw_trace`.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from cli import output
from cli.commands import wants_json
from cli.crash import KILL_TOKENS, STREAMS, Crash, crash_worker
from cli.explain import trace_lines, trace_object
from cli.failure import CommandFailed
from sluice.client.aio import AsyncClient
from sluice.client.answer import Answer, AnswerBuilder, Delta, Started
from sluice.errors import RecordUnknown
from sluice.v1.admin_pb2 import RequestRecord

if TYPE_CHECKING:  # needs the extra "mesh"
    from sluice.settings import Settings
    from supervisor.mesh import Mesh

GENERAL: Final = "chat"
"""The general language model; a mesh without its weights serves the specialists alone."""
CRASHING: Final = "small"
"""The model that loses a worker."""
WORKERS: Final = 2
CALL_S: Final = 120.0
"""Deadline of a call, in seconds."""
RECORD_S: Final = 10.0
"""How long the record of an answer may take to appear, in seconds."""
RECORD_RETRY_S: Final = 0.05


@dataclass(frozen=True)
class Task:
    """A prompt and the model that `auto` has to choose for it."""

    prompt: str
    model: str


TASKS: Final = (
    Task("What is the capital of France?", GENERAL),
    Task(
        "Extract the order and the amount: It cost me 409.46 euros. It is about order E-90867.",
        "small",
    ),
    Task("What is the total of 314, 272, 973, 323, 486?", "large"),
)
WITHOUT_GENERAL: Final = (
    Task("Which label fits this ticket? My lamp arrived broken.", "small"),
    *TASKS[1:],
)


def demo() -> None:
    """Show routing, a worker's crash in mid-stream and a trace, on a mesh of its own on free ports.

    Exits with 0 only if every prompt was answered by the model that it is meant for, every stream survived the crash
    without a lost, doubled or changed token, and the trace was recorded.
    """
    # Imported here: it needs the extra "mesh".
    from sluice.settings import load
    from sluice.settings.models import convert_models

    settings = _demo_settings(load())
    convert_models(settings.models)
    output.show(asyncio.run(_demo(settings)))


async def _demo(settings: "Settings") -> dict[str, Any]:
    from supervisor.mesh import running_mesh

    _say("starting NATS, Triton, batcher, gateway and jobs ...")
    async with running_mesh(settings) as mesh, AsyncClient(mesh.address) as client:
        models = [model.name for model in settings.models]
        _say(f"ready in {mesh.ready_s:.1f} s with {', '.join(models)} at {mesh.address}")
        result = await _show(client, mesh, has_general=GENERAL in models)
    _say("stopped")
    return result


def _demo_settings(settings: "Settings") -> "Settings":
    """Give the small model a second worker, and the general one room for the single prompt that it gets."""
    if missing := {task.model for task in WITHOUT_GENERAL} - {one.name for one in settings.models}:
        message = f"models: {', '.join(sorted(missing))} missing; unset SLUICE_MODELS for the demo"
        raise CommandFailed("SETUP", message)
    changes: dict[str, dict[str, Any]] = {
        CRASHING: {"replicas": WORKERS},
        GENERAL: {"slots": 1, "context_tokens": 512, "cache_gb": 0.05},
    }
    models = [model.model_copy(update=changes.get(model.name)) for model in settings.models]
    gateway = settings.gateway.model_copy(update={"address": "127.0.0.1:0"})
    return settings.model_copy(update={"gateway": gateway, "models": tuple(models)})


async def _show(client: AsyncClient, mesh: "Mesh", *, has_general: bool) -> dict[str, Any]:
    from sluice.settings.model_cache import chat_problem

    _say("\n1. A model for every prompt (model: auto)")
    if not has_general:
        _say(f"   without the general model: {chat_problem() or f'no model {GENERAL}'}")
    answers = await answer_tasks(client, TASKS if has_general else WITHOUT_GENERAL)

    _say(f"\n2. kill -9 of a worker while {STREAMS} answers are streamed")
    workers = [name for name in mesh.supervisor.pids if name.startswith(f"triton-{CRASHING}")]
    with _quiet("supervisor"):  # it warns of the worker that the demo kills
        crash = await survive_crash(client, workers, partial(_kill, mesh))

    _say("\n3. The trace of an answer that lost its worker")
    trace = await draw_trace(client, crash.request_id)
    return {"answers": answers, "crash": vars(crash), "trace": trace}


async def answer_tasks(client: AsyncClient, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Ask every task with model `auto` and print the answers with the reason of each route.

    Raises:
        CommandFailed: another model answered than the one that the task is for.
        SluiceError: a task got no answer.
    """
    answers = list[dict[str, Any]]()
    for task in tasks:
        answer = await _ask(client, task.prompt)
        answers.append({"prompt": task.prompt, **output.answer_object(answer)})
        if answer.model != task.model:
            message = f"{task.prompt!r}: {answer.model} answered instead of {task.model}"
            raise CommandFailed("ROUTE_UNEXPECTED", message, {"answers": answers})
    return answers


async def _ask(client: AsyncClient, prompt: str) -> Answer:
    builder = AnswerBuilder()
    _say(f"   > {prompt}")
    async with client.generate(prompt, max_tokens=112, timeout_s=CALL_S) as stream:
        async for event in stream:
            builder.add(event)
            if isinstance(event, Started):
                _say(f"   {event.model}: ", end="")
            elif isinstance(event, Delta):
                _say(event.text.replace("\n", "\n   "), end="")
    answer = builder.build()
    first_ms = answer.timings.time_to_first_token_ms
    _say(f"\n     because: {answer.route.reason}; first token after {first_ms:.0f} ms")
    return answer


async def survive_crash(
    client: AsyncClient, workers: Sequence[str], kill: Callable[[str], None]
) -> Crash:
    """Kill a worker in mid-stream and print what the callers saw of it.

    Raises:
        CommandFailed: a token was lost, doubled or changed, or no stream was on a killed worker.
        SluiceError: a stream failed.
    """
    crash = await crash_worker(client, CRASHING, workers, kill)
    _say(
        f"   killed {', '.join(crash.killed)} after {KILL_TOKENS} tokens:"
        f" {crash.recovered} of {STREAMS} streams went on at the other worker"
    )
    counts = f"{crash.lost} lost, {crash.doubled} doubled, {crash.changed} changed"
    _say(
        f"   gap {crash.gap_ms:.0f} ms;"
        f" {crash.tokens:,} tokens compared with an undisturbed run: {counts}"
    )
    if not crash.is_exact:
        raise CommandFailed("STREAM_DAMAGED", f"tokens: {counts}", {"crash": vars(crash)})
    return crash


async def draw_trace(client: AsyncClient, request_id: str) -> dict[str, object]:
    """Print where the time of a request went, as `sluice trace` does.

    Raises:
        CommandFailed: the request has no record with times.
    """
    record = await _record_of(client, request_id)
    for line in trace_lines(record):
        _say(f"   {line}")
    described = trace_object(record)
    if not described["hops"]:
        raise CommandFailed("TRACE_INCOMPLETE", f"the record of {request_id} has no times")
    return described


async def _record_of(client: AsyncClient, request_id: str) -> RequestRecord:
    """Return the record of a request, which appears a moment after its end."""
    async with asyncio.timeout(RECORD_S):
        while True:
            try:
                return (await client.explain(request_id)).record
            except RecordUnknown:
                await asyncio.sleep(RECORD_RETRY_S)


def _kill(mesh: "Mesh", worker: str) -> None:
    child = mesh.supervisor.process(worker).child
    if child is None:
        raise CommandFailed("NOT_INTERRUPTED", f"{worker} is not running; run the demo again")
    child.send(signal.SIGKILL)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Log only errors of a package while the block runs."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _say(text: str, end: str = "\n") -> None:
    """Print progress for people."""
    if not wants_json():
        output.write_text(text + end)
