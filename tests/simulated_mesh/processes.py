"""Batchers and gateways in virtual time: the shipped ones, on a simulated NATS and without gRPC servers."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import nats.errors
from opentelemetry.trace import NoOpTracer

from batcher.app import Batcher
from gateway.server import TICK_S
from gateway.streaming.answer_stream import AnswerStream
from gateway.streaming.idempotency import ReplayCache
from gateway.upstream.nats_transport import BUSY_S, LAG_S, NatsTransport
from sluice.errors import Cancelled, SluiceError, TransportUnavailable
from sluice.internal.v1.task_pb2 import Sampling
from sluice.settings import Settings
from sluice.telemetry.instruments import Instruments
from sluice.v1.inference_pb2 import Started
from sluice.wire.connection import NatsUnreachable
from sluice.wire.jetstream import DEAD_LETTERS, ensure_stream
from tests.gateway.kit.runs import Asked, new_run
from tests.simulated_mesh.loop import SimulatedProcess
from tests.simulated_mesh.nats import Connection, NatsServer

READER_TOKENS: Final = 10_000


class BatcherProcess:
    """A batcher.

    Attributes:
        batcher: None until it is connected.
        draining: it was told to end.
        unreachable: it has ended, because NATS did not answer when it started; it must be started again.
    """

    def __init__(self, server: NatsServer, name: str, settings: Settings, skew_s: float) -> None:
        self.process = SimulatedProcess(server.loop, name, skew_s)
        self.connection = Connection(server, self.process)
        self._name, self._settings = name, settings
        self._stop = asyncio.Event()
        self.draining = self.unreachable = False
        self.batcher: Batcher | None = None
        self.main = self.process.spawn(self._run())

    def drain(self) -> None:
        """SIGTERM."""
        self.draining = True
        self.process.soon(self._stop.set)

    def crash(self) -> None:
        """SIGKILL."""
        self.process.crash()
        self.connection.gone()

    def waits_for(self, url: str) -> int | None:
        """Rows that it has sent to the worker at ``url`` while others wait for it here; None: none could go there."""
        if not self.process.running or self.draining or not (self.batcher and self.batcher.loops):
            return None
        (model,) = self.batcher.loops.values()
        workers = model.table.workers
        active = {name: state for name, state in workers.active().items() if name.startswith(url)}
        if not active or any(map(workers.is_failing, active)):
            return None
        (state,) = active.values()
        return state.sent_requests if model.table.queue.order.waiting else None

    async def _run(self) -> None:
        await prepare(self.connection, self._settings)
        made_of: Any = self.connection, self._settings, self._name, NoOpTracer(), Instruments()
        self.batcher = Batcher(*made_of)
        self.connection.on_loss = self.batcher.on_loss
        try:
            await self.batcher.run(self._stop)
        except NatsUnreachable:
            self.unreachable = True
        await self.connection.close()


@dataclass(eq=False)
class Request:
    """What a caller asks for, and what it got.

    Attributes:
        tokens: as they were delivered.
        error: how it ended, if with one.
        finished: how often it was told that the answer is complete.
        leaves_s: after this time the caller goes away; None: it stays.
        gateway: that was asked.
    """

    request_id: str
    prompt: Sequence[int] = field(repr=False)
    max_tokens: int
    priority_class: str
    timeout_s: float
    leaves_s: float | None = None
    gateway: "GatewayProcess | None" = field(default=None, repr=False)
    asked_at: float = 0.0
    ended_at: float | None = None
    tokens: list[int] = field(default_factory=list, repr=False)
    error: SluiceError | None = None
    finished: int = 0

    @property
    def over(self) -> bool:
        """Whether the caller waits no more: it has an end, or its gateway is gone."""
        return self.ended_at is not None or self.gateway is None or not self.gateway.process.alive

    def expected(self) -> list[int]:
        """The answer of an undisturbed run."""
        return [self.prompt[index % len(self.prompt)] for index in range(self.max_tokens)]


async def prepare(connection: Connection, settings: Settings) -> None:
    """As `sluice.wire.connection.connect`, in a process that starts again and again until NATS answers."""
    while True:
        try:
            return await ensure_stream(connection.jetstream(), DEAD_LETTERS, 1)
        except nats.errors.TimeoutError:
            await asyncio.sleep(0.1)


class _NoText:
    def push(self, token_id: int) -> str:
        return "."

    def flush(self) -> str:
        return ""


class GatewayProcess:
    """A gateway, with callers that read its streams.

    Attributes:
        serving: it accepts calls.
        unreachable: as in `BatcherProcess`.
    """

    def __init__(self, server: NatsServer, name: str, settings: Settings, skew_s: float) -> None:
        self.process = SimulatedProcess(server.loop, name, skew_s)
        self.connection = Connection(server, self.process)
        self._stall_s = settings.gateway.stall_s
        self._transport = NatsTransport(name, self._stall_s, ReplayCache(16, 60.0))
        self.registry = self._transport.registry
        self.dispatch = self.registry.dispatch
        self.loads = self._transport.loads
        self._settings = settings
        self.serving = self.unreachable = False
        self.main = self.process.spawn(self._run())

    def ask(self, request: Request) -> None:
        """A caller asks."""
        self.process.spawn(self._answer(request))

    def crash(self) -> None:
        """SIGKILL; its callers see the connection break."""
        self.process.crash()
        self.connection.gone()

    async def _run(self) -> None:
        await prepare(self.connection, self._settings)
        self.connection.on_loss = self._transport.on_reconnect
        try:
            await self._transport.start(self.connection)  # type: ignore[arg-type]
        except NatsUnreachable:
            self.unreachable = True
            return
        self.serving = True
        while True:
            now = time.monotonic()
            self._transport.tick(now)
            # It is busy for 3 of 4 seconds: frequent tasks leave together.
            self._transport.coalescer.note_lag(2 * LAG_S * (now // (2 * BUSY_S) % 2))
            await asyncio.sleep(TICK_S)

    async def _answer(self, request: Request) -> None:
        """As `gateway.api.generate`."""
        woken = asyncio.Event()
        stream = self._open(request)
        reader = stream.join(0, READER_TOKENS, woken.set, lambda _: woken.set())
        try:
            async with asyncio.timeout(request.leaves_s):
                await self._read(request, stream, reader, woken)
        except SluiceError as error:
            request.error = error
        except TimeoutError:
            request.error = Cancelled("the caller has gone")
        finally:
            stream.leave(reader)
            request.ended_at = time.monotonic()

    async def _read(
        self, request: Request, stream: AnswerStream, reader: int, woken: asyncio.Event
    ) -> None:
        while not request.finished:
            woken.clear()
            if (response := stream.read(reader)) is not None:
                if response.HasField("delta"):
                    assert response.delta.index == len(request.tokens), "a gap or a doubled token"
                    request.tokens += response.delta.token_ids
                request.finished += response.HasField("finished")
            if not request.finished:
                await woken.wait()

    def _open(self, request: Request) -> AnswerStream:
        now, name = time.monotonic(), request.request_id
        request.asked_at = now
        asked = Asked(event=Started(request_id=name, model="echo"), arrived_at=now)
        run = new_run(
            name,
            "echo",
            stall_s=self._stall_s,
            now=now,
            prompt_tokens=len(request.prompt),
            detokenizer=_NoText(),
            deadline=now + request.timeout_s,
            gateway=self._transport.gateway_id,
            tenant="default",
            priority_class=request.priority_class,
            prompt_token_ids=request.prompt,
            sampling=Sampling(max_tokens=request.max_tokens, top_p=1, repetition_penalty=1),
        )
        stream = AnswerStream(self.registry, asked, run)
        if self._transport.is_connected:
            self.dispatch.send(run, now)
        else:
            self.registry.fail_send(name, TransportUnavailable("NATS is not connected"))
        return stream
