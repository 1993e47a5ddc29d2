"""`sluice demo`: routing, the crash of a worker and a trace, shown on a mesh that runs as long as the command.

The mesh serves the models of the configuration, the small one on two workers. Each of the three parts is a function of
a client: `answer_tasks`, `survive_crash` and `draw_trace`.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from cli import output
from cli.commands import wants_json
from cli.explain import trace_lines, trace_object
from cli.failure import CommandFailed
from sluice.client.aio import AsyncClient
from sluice.client.answer import AnswerBuilder, Delta, Notice, NoticeKind, Started
from sluice.errors import RecordUnknown
from sluice.wire.patience import patiently
from sluice.wire.tokens import VisibleToken

if TYPE_CHECKING:  # needs the extra "mesh"
    from sluice.settings import Settings
    from supervisor.mesh import Mesh

GENERAL: Final = "chat"
"""The general language model; a mesh without its weights serves the specialists alone."""
CRASHING: Final = "small"
"""The model that loses a worker."""
WORKERS: Final = 2
STREAMS: Final = 4
STREAM_TOKENS: Final = 600
"""Length of each stream, so that it is still running when its worker is killed."""
KILL_TOKENS: Final = 100
"""A worker is killed once every stream has this many tokens."""
CALL_S: Final = 120.0
"""Timeout of a call, in seconds."""
RECORD_S: Final = 10.0
"""How long the record of an answer may take to appear, in seconds."""
RECORD_RETRY_S: Final = 0.05
TASKS: Final[Mapping[str, str]] = {
    "What is the capital of France?": GENERAL,
    "Which label fits this ticket? My lamp arrived broken.": "small",
    "Extract the order and the amount: It cost me 409.46 euros. It is about order E-90867.": "small",
    "What is the total of 314, 272, 973, 323, 486?": "large",
}
"""Prompts, and the model that `auto` has to choose for each."""


def demo() -> None:
    """Show routing, a worker's crash in mid-stream and a trace, on a mesh of its own on free ports.

    Exits with 0 only if every prompt was answered by the model that it is meant for, every stream survived the crash
    without a lost, doubled or changed token, and the trace was recorded.
    """
    # Imported here: it needs the extra "mesh".
    from sluice.settings import load
    from sluice.settings.models import convert_models

    settings = _demo_settings(load())
    logging.getLogger("supervisor").setLevel(logging.ERROR)  # it warns of the worker that is killed
    convert_models(settings.models)
    output.show(asyncio.run(_demo(settings)), "stopped")


def _demo_settings(settings: "Settings") -> "Settings":
    """Give the small model a second worker, and the general one room for the single prompt that it gets."""
    names = {model.name for model in settings.models}
    if missing := set(TASKS.values()) - {GENERAL} - names:
        message = f"models: {', '.join(sorted(missing))} missing; unset SLUICE_MODELS for the demo"
        raise CommandFailed("SETUP", message)
    changes: dict[str, dict[str, Any]] = {
        CRASHING: {"replicas": WORKERS},
        GENERAL: {"slots": 1, "context_tokens": 512, "cache_gb": 0.05},
    }
    models = [model.model_copy(update=changes.get(model.name)) for model in settings.models]
    gateway = settings.gateway.model_copy(update={"address": "127.0.0.1:0"})
    return settings.model_copy(update={"gateway": gateway, "models": tuple(models)})


async def _demo(settings: "Settings") -> dict[str, Any]:
    from supervisor.mesh import running_mesh

    _print("starting NATS, Triton, batcher, gateway and jobs ...")
    async with running_mesh(settings) as mesh, AsyncClient(mesh.address) as client:
        models = [model.name for model in settings.models]
        _print(f"ready in {mesh.ready_s:.1f} s with {', '.join(models)} at {mesh.address}")
        _print("\n1. A model for every prompt (model: auto)")
        tasks = {prompt: model for prompt, model in TASKS.items() if model in models}
        answers = await answer_tasks(client, tasks)
        _print(f"\n2. kill -9 of a worker while {STREAMS} answers are streamed")
        workers = [name for name in mesh.supervisor.pids if name.startswith(f"triton-{CRASHING}")]
        crash = await survive_crash(client, workers, partial(_kill, mesh))
        _print("\n3. The trace of an answer that lost its worker")
        trace = await draw_trace(client, crash["request_id"])
    return {"answers": answers, "crash": crash, "trace": trace}


async def answer_tasks(client: AsyncClient, tasks: Mapping[str, str]) -> list[dict[str, Any]]:
    """Ask every prompt with model `auto` and print the answers with the reason of each route.

    Raises:
        CommandFailed: another model answered than the one that the prompt is for.
        SluiceError: a prompt got no answer.
    """
    answers = list[dict[str, Any]]()
    for prompt, model in tasks.items():
        builder = AnswerBuilder()
        _print(f"   > {prompt}")
        async with client.generate(prompt, max_tokens=112, timeout_s=CALL_S) as stream:
            async for event in stream:
                builder.add(event)
                if isinstance(event, Started):
                    _print(f"   {event.model}: ", end="")
                elif isinstance(event, Delta):
                    _print(event.text.replace("\n", "\n   "), end="")
        answer = builder.build()
        first_ms = answer.timings.time_to_first_token_ms
        _print(f"\n     because: {answer.route.reason}; first token after {first_ms:.0f} ms")
        answers.append({"prompt": prompt, **output.answer_object(answer)})
        if answer.model != model:
            message = f"{prompt!r}: {answer.model} answered instead of {model}"
            raise CommandFailed("ROUTE_UNEXPECTED", message, {"answers": answers})
    return answers


@dataclass
class Received:
    """What a caller received of one stream.

    Attributes:
        tokens: each with its index.
        last_s: when the last of them came.
        recovered: whether another worker continues the stream.
        gap_ms: time between the last token before that and the first one after it; 0 before both.
    """

    request_id: str = ""
    tokens: list[tuple[int, VisibleToken]] = field(default_factory=list)
    last_s: float = 0.0
    recovered: bool = False
    gap_ms: float = 0.0

    async def read(self, client: AsyncClient, seed: int, on_token: Callable[[], None]) -> None:
        """Read the stream of a seed; call `on_token` after each token."""
        stream = client.generate(
            f"Write a polite reply. My order is D-9119{seed}.",
            model=CRASHING,
            max_tokens=STREAM_TOKENS,
            min_tokens=STREAM_TOKENS,
            temperature=1.0,
            seed=seed,
            timeout_s=CALL_S,
        )
        async for event in stream:
            if isinstance(event, Started):
                self.request_id = event.request_id
            elif isinstance(event, Notice):
                self.recovered |= event.kind == NoticeKind.RECOVERED
            elif isinstance(event, Delta) and event.token_ids:
                now_s = perf_counter()
                if self.recovered and not self.gap_ms:
                    self.gap_ms = 1000 * (now_s - self.last_s)
                self.last_s = now_s
                self.tokens += enumerate(event.token_ids, event.index)
                on_token()


async def survive_crash(
    client: AsyncClient, workers: Sequence[str], kill: Callable[[str], None]
) -> dict[str, Any]:
    """Kill a worker in mid-stream, and compare every stream with an undisturbed one of the same seed.

    The mesh places the streams, so the first worker may have none of them; then the next one is killed, too.

    Raises:
        CommandFailed: a stream has other tokens, or no stream was on a killed worker.
        SluiceError: a stream failed.
    """
    undisturbed = await _stream_all(client, lambda: None)
    killed = list[str]()
    for worker in workers:
        killed.append(worker)
        streams = await _stream_all(client, partial(kill, worker))
        if recovered := [stream for stream in streams if stream.recovered]:
            break
    else:
        message = f"{', '.join(workers)}: no stream was on a killed worker; run the demo again"
        raise CommandFailed("NOT_INTERRUPTED", message)
    pairs = zip(undisturbed, streams, strict=True)
    crash = {
        "killed": killed,
        "recovered": len(recovered),
        "gap_ms": max(stream.gap_ms for stream in recovered),
        "tokens": sum(len(stream.tokens) for stream in undisturbed),
        "damaged": sum(before.tokens != after.tokens for before, after in pairs),
        "request_id": recovered[0].request_id,
    }
    _print(
        f"   killed {', '.join(killed)} after {KILL_TOKENS} tokens: {len(recovered)} of {STREAMS} streams went on at "
        f"another worker\n   gap {crash['gap_ms']:.0f} ms; {crash['tokens']:,} tokens compared with an undisturbed "
        f"run: {crash['damaged']} streams differ"
    )
    if crash["damaged"]:
        message = f"{crash['damaged']} of {STREAMS} streams have other tokens than undisturbed"
        raise CommandFailed("STREAM_DAMAGED", message, {"crash": crash})
    return crash


async def _stream_all(client: AsyncClient, at_mark: Callable[[], None]) -> list[Received]:
    """Receive all streams at the same time; call `at_mark` once, when each has `KILL_TOKENS`.

    Raises:
        CommandFailed: `at_mark` failed.
        SluiceError: a stream failed.
    """
    streams, marked = [Received() for _ in range(STREAMS)], False

    def on_token() -> None:
        nonlocal marked
        if not marked and all(len(stream.tokens) >= KILL_TOKENS for stream in streams):
            marked = True
            at_mark()

    try:
        async with asyncio.TaskGroup() as group:
            for seed, stream in enumerate(streams):
                group.create_task(stream.read(client, seed, on_token))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None  # the error of one stream ends all: report that one
    return streams


async def draw_trace(client: AsyncClient, request_id: str) -> dict[str, object]:
    """Print where the time of a request went, as `sluice trace` does, once its record has appeared.

    Raises:
        CommandFailed: the record has no times.
        SluiceError: there is no record, or it cannot be read.
    """
    response = await patiently(
        lambda: client.explain(request_id),
        (RecordUnknown,),
        bound_s=RECORD_S,
        wait_s=RECORD_RETRY_S,
    )
    record = response.record
    for line in trace_lines(record):
        _print(f"   {line}")
    described = trace_object(record)
    if not described["hops"]:
        raise CommandFailed("TRACE_INCOMPLETE", f"the record of {request_id} has no times")
    return described


def _kill(mesh: "Mesh", worker: str) -> None:
    child = mesh.supervisor.process(worker).child
    if child is None:
        raise CommandFailed("NOT_INTERRUPTED", f"{worker} is not running; run the demo again")
    child.send(signal.SIGKILL)


def _print(text: str, end: str = "\n") -> None:
    """Print progress for people."""
    if not wants_json():
        output.write_text(text + end)
