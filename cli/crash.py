"""Streams whose worker is killed, compared with undisturbed ones of the same seeds: a part of `sluice demo`."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Final

from cli.failure import CommandFailed
from sluice.client.aio import AsyncClient
from sluice.client.answer import Delta, Event, Notice, NoticeKind, Started
from sluice.wire.tokens import VisibleToken

STREAMS: Final = 4
STREAM_TOKENS: Final = 600
"""Length of each stream, so that it is still running when its worker is killed."""
KILL_TOKENS: Final = 100
"""A worker is killed once every stream has this many tokens."""
STREAM_S: Final = 120.0
"""Deadline of a stream, in seconds."""


@dataclass
class Received:
    """What a caller received of one stream.

    Attributes:
        tokens: each with its index.
        last_s: when the last of them came.
        recovered: whether another worker continues the stream.
        gap_ms: time between the last token before that and the first one after it; None before both.
    """

    request_id: str = ""
    tokens: list[tuple[int, VisibleToken]] = field(default_factory=list)
    last_s: float = 0.0
    recovered: bool = False
    gap_ms: float | None = None

    def add(self, event: Event, now_s: float) -> None:
        """Note an event of the stream."""
        if isinstance(event, Started):
            self.request_id = event.request_id
        elif isinstance(event, Notice):
            self.recovered |= event.kind == NoticeKind.RECOVERED
        elif isinstance(event, Delta) and event.token_ids:
            if self.recovered and self.gap_ms is None:
                self.gap_ms = 1000 * (now_s - self.last_s)
            self.last_s = now_s
            self.tokens += enumerate(event.token_ids, event.index)


@dataclass(frozen=True)
class Crash:
    """What the callers of a model saw of the loss of a worker.

    Attributes:
        killed: the workers that were killed, until streams were on one of them.
        recovered: streams that lost their worker.
        gap_ms: longest time that one of these stood still at the crash.
        tokens: of all streams without a crash.
        lost, doubled, changed: tokens of all streams, compared with those.
        request_id: one of the streams that lost their worker.
    """

    killed: tuple[str, ...]
    recovered: int
    gap_ms: float
    tokens: int
    lost: int
    doubled: int
    changed: int
    request_id: str

    @property
    def is_exact(self) -> bool:
        """Whether every stream has the tokens that it has without a crash."""
        return not (self.lost or self.doubled or self.changed)


async def crash_worker(
    client: AsyncClient, model: str, workers: Sequence[str], kill: Callable[[str], None]
) -> Crash:
    """Kill a worker of `model` in mid-stream and compare every stream with an undisturbed one.

    The mesh places the streams, so the first worker may have none of them; then the next one is killed, too.

    Raises:
        CommandFailed: no stream was on a killed worker.
        SluiceError: a stream failed.
    """
    undisturbed = await _stream_all(client, model, lambda: None)
    for count, worker in enumerate(workers, start=1):
        streams = await _stream_all(client, model, partial(kill, worker))
        if any(stream.recovered for stream in streams):
            return compare(workers[:count], undisturbed, streams)
    message = f"{', '.join(workers)}: no stream was on a killed worker; run the demo again"
    raise CommandFailed("NOT_INTERRUPTED", message)


def compare(
    killed: Sequence[str], undisturbed: Sequence[Received], streams: Sequence[Received]
) -> Crash:
    """Count the tokens that `streams` lost, doubled or changed; one of them at least lost its worker."""
    lost = doubled = changed = 0
    for before, after in zip(undisturbed, streams, strict=True):
        expected, received = dict(before.tokens), dict(after.tokens)
        lost += len(expected.keys() - received.keys())
        doubled += len(after.tokens) - len(received)
        changed += sum(expected.get(index) != token for index, token in after.tokens)
    recovered = [stream for stream in streams if stream.recovered]
    return Crash(
        killed=tuple(killed),
        recovered=len(recovered),
        gap_ms=max(stream.gap_ms or 0.0 for stream in recovered),
        tokens=sum(len(stream.tokens) for stream in undisturbed),
        lost=lost,
        doubled=doubled,
        changed=changed,
        request_id=recovered[0].request_id,
    )


async def _stream_all(
    client: AsyncClient, model: str, at_mark: Callable[[], None]
) -> list[Received]:
    """Receive all streams at the same time; call `at_mark` once, when each has `KILL_TOKENS`."""
    streams = [Received() for _ in range(STREAMS)]
    waiting = set(range(STREAMS))

    def on_event(seed: int) -> None:
        if seed in waiting and len(streams[seed].tokens) >= KILL_TOKENS:
            waiting.remove(seed)
            if not waiting:
                at_mark()

    async with asyncio.TaskGroup() as group:
        for seed, received in enumerate(streams):
            group.create_task(_receive(client, model, seed, received, on_event))
    return streams


async def _receive(
    client: AsyncClient, model: str, seed: int, received: Received, on_event: Callable[[int], None]
) -> None:
    stream = client.generate(
        f"Write a polite reply. My order is D-9119{seed}.",
        model=model,
        max_tokens=STREAM_TOKENS,
        min_tokens=STREAM_TOKENS,
        temperature=1.0,
        seed=seed,
        timeout_s=STREAM_S,
    )
    async for event in stream:
        received.add(event, perf_counter())
        on_event(seed)
