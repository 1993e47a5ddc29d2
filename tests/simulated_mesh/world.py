"""A whole mesh in virtual time, driven by one seed: callers ask, and everything that can go wrong does.

Gateways, batchers and workers are the shipped ones, and their messages cross a simulated NATS and simulated gRPC.
Messages are late, lost and doubled; connections are held up and cut; processes stop, crash, drain and come back with
clocks that are wrong; NATS stops and starts again. After `QUIET_S` all faults end. `World.run` raises when

- an answer differs from that of an undisturbed run in what was delivered, or has a gap or a doubled token;
- a stream does not end exactly once, with the whole answer or with a typed error that fits what happened;
- something waits past its deadline, or is still waited for long after the faults have ended;
- a worker has more rows than places, or a free slot for `IDLE_S` while rows wait in a batcher that may send to it and
  sends none;
- a process ends by a fault of its own, or an exception is left to the loop;
- anything is left in a gateway, a batcher, a worker or the work queue when all has ended.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import Context
from functools import partial
from random import Random
from typing import Any, Final
from unittest.mock import patch

import grpc.aio

from sluice import errors
from sluice.settings import BatcherSettings, GatewaySettings, ModelSettings, Settings
from sluice.settings.batching import Policy
from sluice.settings.routing import RoutingSettings
from sluice.wire.subjects import CLASSES
from tests.simulated_mesh.jetstream import JetStreamServer
from tests.simulated_mesh.loop import SimulatedProcess, virtual_time
from tests.simulated_mesh.nats import Connection, NatsServer
from tests.simulated_mesh.processes import BatcherProcess, GatewayProcess, Request
from tests.simulated_mesh.triton import TritonChannel, TritonServer
from tests.support.settings import tuned

ASK_S: Final = 15.0
"""Requests come in this time."""
QUIET_S: Final = 20.0
LONG_QUIET_S: Final = 70.0
"""In a few histories faults are long: batchers forget a gateway that is away for 30 s."""
SETTLED_S: Final = 40.0
"""So long after the faults everything that was asked has been answered."""
FORGOTTEN_S: Final = 45.0
"""So long after that everything is forgotten: batchers keep rows of a gateway that is away for 30 s."""
STILL_S: Final = 5.0
"""Until what was forgotten cannot come back: longer than every other interval of the mesh."""
STEP_S: Final = 0.1
FINE_STEP_S: Final = 0.02
"""Of an engine, in every tenth history; answers have as many more tokens, and so take as long."""
ANSWER_S_MAX: Final = 2.0
"""Of one that has a worker for itself."""
TICK_S: Final = 0.43
"""No part of a heartbeat, at which many things happen: what is idle at every tick is idle."""
IDLE_S: Final = 4.0
"""Room of a batcher that stands still is others' after three heartbeats; messages are up to 0.5 s on their way."""
LATE_S: Final = 50.0
"""A gateway may be stopped when a deadline passes."""
ROUNDING_S: Final = 1e-6
TYPED: Final = (
    errors.EngineFailed,
    errors.ModelUnavailable,
    errors.Overloaded,
    errors.TransportUnavailable,
)
"""What faults may do to a request; callers may try again."""


class World:
    """The mesh of one seed.

    Attributes:
        outcomes: how requests ended, counted.
    """

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.requests: list[Request] = []
        self._names: Counter[str] = Counter()
        self._idle_since: dict[tuple[str, str, int], float] = {}
        """Since when a worker has a free slot, and a batcher rows for it of which so many have been sent."""
        self._long = 6.0 if self.chance.random() < 0.1 else 1.0
        self._step_s = FINE_STEP_S if self.chance.random() < 0.1 else STEP_S
        self._quiet_s = LONG_QUIET_S if self._long > 1 else QUIET_S
        self.retired: list[BatcherProcess] = []

    def run(self) -> None:
        """Plays the history."""
        with ExitStack() as stack:
            self.loop = stack.enter_context(virtual_time())
            stack.enter_context(patch.object(grpc.aio, "insecure_channel", self._channel))
            logging.disable(logging.CRITICAL)
            stack.callback(logging.disable, logging.NOTSET)
            self._build()
            self._plan()
            self.loop.run_until_complete(self._watch())

    # The mesh.

    def _build(self) -> None:
        chance = self.chance
        self.server = NatsServer(self.loop, chance)
        self.jetstream = JetStreamServer(self.server)
        self.server.faults.delay_s = chance.choice([0.002, 0.02])
        urls = [f"t{number}:1" for number in range(self._many(3))]
        self.tritons = {
            url: TritonServer(self.loop, chance, self.server.delay_s, self._step_s) for url in urls
        }
        self.settings = Settings(
            models=(
                ModelSettings(name="echo", path="none", engine="echo", triton_url=tuple(urls)),
            ),
            routing=RoutingSettings(default="echo"),
            batcher=tuned(BatcherSettings, heartbeat_ms=500, stall_s=2.0, drain_s=1.0),
            gateway=tuned(GatewaySettings, stall_s=1.0),
        )
        self.batchers = [self._batcher() for _ in range(self._many(3))]
        self.gateways = [self._gateway() for _ in range(self._many(2))]

    def _many(self, most: int) -> int:
        """How many processes of a kind there are."""
        return self.chance.randrange(1, most + 1)

    def _channel(self, url: str, options: object = None) -> TritonChannel:
        return TritonChannel(self.tritons[url])

    def _name(self, kind: str) -> str:
        self._names[kind] += 1
        return f"{kind}{self._names[kind]}"

    def _skew_s(self) -> float:
        return self.chance.choice([0.0, 0.0, -3600.0, 90.0])

    def _batcher(self) -> BatcherProcess:
        return BatcherProcess(self.server, self._name("b"), self.settings, self._skew_s())

    def _gateway(self) -> GatewayProcess:
        return GatewayProcess(self.server, self._name("g"), self.settings, self._skew_s())

    # What happens.

    def _at(self, at: float, act: Callable[[], object]) -> None:
        self.loop.call_at(at, act, context=Context())

    def _after(self, seconds: float, act: Callable[[], object]) -> None:
        """Never after the faults have ended, so that everything is whole then."""
        self._at(min(self.loop.time() + seconds, self._quiet_s), act)

    def _plan(self) -> None:
        chance = self.chance
        for _ in range(chance.randrange(5, 40)):
            self._at(3.0 + chance.random() * (ASK_S - 3.0), self._ask)
        faults = [
            *(self._crash_batcher, self._crash_batcher, self._stop_batcher, self._drain_batcher),
            *(self._crash_gateway, self._stop_gateway, self._crash_worker, self._crash_triton),
            *(self._stop_worker, self._cut, self._cut, self._hold, self._hold),
            *(self._stop_nats, self._restart_nats, self._slow_down, self._lose, self._lose),
            *(self._change_policy, self._fail_worker, self._forge, self._forge),
        ]
        for _ in range(chance.randrange(12)):
            self._at(3.0 + chance.random() * (QUIET_S - 5.0), chance.choice(faults))
        self._at(self._quiet_s, self._calm)

    def _ask(self) -> None:
        chance = self.chance
        request = Request(
            request_id=f"r{len(self.requests) + 1}",
            prompt=chance.sample(range(5000), chance.randrange(8, 120)),
            max_tokens=chance.randrange(1, round(ANSWER_S_MAX / self._step_s)),
            priority_class=chance.choice(CLASSES),
            timeout_s=chance.choice([1.0, 5.0, *[300.0] * 8]),
            leaves_s=chance.random() * 8 if chance.random() < 0.15 else None,
        )
        self.requests.append(request)
        gateway = chance.choice(self.gateways)
        request.asked_at = self.loop.time()
        if gateway.process.alive and gateway.serving:
            request.gateway = gateway
            gateway.process.soon(gateway.ask, request)
        else:
            request.ended_at = self.loop.time()
            request.error = errors.TransportUnavailable("no gateway")

    def _calm(self) -> None:
        self.server.faults.delay_s = 0.002
        self.server.faults.loss = self.server.faults.double = self.server.faults.forge = 0.0

    # Faults.

    def _crash_batcher(self) -> None:
        place = self.chance.randrange(len(self.batchers))
        if self.batchers[place].process.alive:
            self.batchers[place].crash()
            self._after(self.chance.random() * 4, partial(self._replace_batcher, place))

    def _drain_batcher(self) -> None:
        place = self.chance.randrange(len(self.batchers))
        old = self.batchers[place]
        if old.process.alive and not old.draining and old.batcher is not None:
            old.drain()
            self._after(self.chance.random() * 4, partial(self._replace_batcher, place))

    def _replace_batcher(self, place: int) -> None:
        old = self.batchers[place]
        if not old.process.alive or old.draining:
            self.retired.append(old)
            self.batchers[place] = self._batcher()

    def _crash_gateway(self) -> None:
        place = self.chance.randrange(len(self.gateways))
        if self.gateways[place].process.alive:
            self.gateways[place].crash()
            self._after(self.chance.random() * 4, partial(self._replace_gateway, place))

    def _replace_gateway(self, place: int) -> None:
        if not self.gateways[place].process.alive:
            self.gateways[place] = self._gateway()

    def _crash_worker(self) -> None:
        triton = self.chance.choice([*self.tritons.values()])
        if triton.worker is not None:
            triton.crash_worker()
            self._after(self.chance.random() * 5, partial(self._reload, triton))

    def _crash_triton(self) -> None:
        triton = self.chance.choice([*self.tritons.values()])
        triton.crash()
        self._after(self.chance.random() * 5, partial(self._reload, triton))

    def _fail_worker(self) -> None:
        """The engine gives rows back for a while, as one does whose device fails."""
        triton, seconds = self.chance.choice([*self.tritons.values()]), self._seconds(4)
        if triton.worker is not None:
            triton.worker.fails_until = self.loop.time() + seconds
            self._after(seconds, partial(self._reload, triton))

    def _change_policy(self) -> None:
        """All batchers read another configuration."""
        chance = self.chance
        policy = tuned(
            Policy,
            order=chance.choice(["fair", "fair", "class", "arrival"]),
            max_rows=chance.choice([1, 2, 16]),
            waiting_tokens_max=chance.choice([100, 4096]),
            classes={"standard": {"aging_s": 0.5}, "bulk": {"aging_s": 2.0}},
        )
        batcher = self.settings.batcher.model_copy(update={"policy": policy})
        self.settings = self.settings.model_copy(update={"batcher": batcher})
        for one in self.batchers:
            if one.process.alive and one.batcher is not None:
                for model in one.batcher.loops.values():
                    one.process.soon(model.change, self.settings)

    def _reload(self, triton: TritonServer) -> None:
        if triton.worker is None or not triton.worker.process.alive:
            triton.restart()

    def _stop_batcher(self) -> None:
        self._stop(self.chance.choice(self.batchers).process)

    def _stop_gateway(self) -> None:
        self._stop(self.chance.choice(self.gateways).process)

    def _stop_worker(self) -> None:
        worker = self.chance.choice([*self.tritons.values()]).worker
        if worker is not None:
            self._stop(worker.process)

    def _stop(self, process: SimulatedProcess) -> None:
        """The process stands still for up to 8 s."""
        process.stop()
        self._after(self.chance.random() * 8 * self._long, process.go_on)

    def _connection(self) -> Connection:
        owners: list[BatcherProcess | GatewayProcess] = [*self.batchers, *self.gateways]
        return self.chance.choice(owners).connection

    def _seconds(self, most: float) -> float:
        """At most until the faults end."""
        return min(self.chance.random() * most * self._long, self._quiet_s - self.loop.time())

    def _cut(self) -> None:
        self._connection().cut(self._seconds(8))

    def _hold(self) -> None:
        self._connection().hold(self._seconds(8))

    def _stop_nats(self) -> None:
        seconds = self._seconds(8)
        for connection in self._connections():
            connection.hold(seconds)

    def _restart_nats(self) -> None:
        seconds = self._seconds(4)
        self.jetstream.restart(seconds)
        for connection in self._connections():
            connection.cut(seconds + self.chance.random() * 0.3)

    def _connections(self) -> list[Connection]:
        owners: list[Any] = [*self.batchers, *self.gateways, *self.retired]
        return [owner.connection for owner in owners if owner.process.alive]

    def _slow_down(self) -> None:
        self.server.faults.delay_s = self.chance.choice([0.1, 0.5])

    def _lose(self) -> None:
        self.server.faults.loss = self.chance.choice([0.01, 0.1])
        self.server.faults.double = self.chance.choice([0.0, 0.05])

    def _forge(self) -> None:
        self.server.faults.forge = self.chance.choice([0.02, 0.1])

    # What must be true.

    async def _watch(self) -> None:
        while self.loop.time() < self._quiet_s or not all(one.over for one in self.requests):
            await asyncio.sleep(TICK_S)
            self._check_processes()
            self._check_workers()
            if self.loop.time() > self._quiet_s + SETTLED_S:
                left = [one for one in self.requests if not one.over]
                raise AssertionError(f"never ended: {left}")
        for request in self.requests:
            self._check(request)
        forgotten_at = self.loop.time() + FORGOTTEN_S
        while self.loop.time() < forgotten_at:
            await asyncio.sleep(STILL_S)
            self._check_processes()
            if not self._leftovers():
                return
        assert not self._leftovers(), self._leftovers()

    def _check_processes(self) -> None:
        assert not self.loop.faults, self.loop.faults
        processes: list[Any] = [*self.batchers, *self.gateways, *self.retired]
        for process in processes:
            if process.process.alive and process.main.done():
                process.main.result()
        for place, batcher in enumerate(self.batchers):
            if batcher.unreachable:
                batcher.crash()
                self._replace_batcher(place)
        for place, gateway in enumerate(self.gateways):
            if gateway.unreachable:
                gateway.crash()
                self._replace_gateway(place)

    def _check_workers(self) -> None:
        """No worker with a free slot idles beside rows, whatever other batchers do with their room."""
        now, idle = self.loop.time(), set[tuple[str, str, int]]()
        for url, triton in self.tritons.items():
            if triton.worker is None or not triton.worker.process.running:
                continue
            load = triton.worker.engine.load()
            assert load.running + load.waiting <= load.max_tasks, url
            if load.running + load.waiting < load.slots:
                waiting = [(one.process.name, one.waits_for(url)) for one in self.batchers]
                idle |= {
                    (url, name, self._sent(sent)) for name, sent in waiting if sent is not None
                }
        self._idle_since = {each: self._idle_since.get(each, now) for each in idle}
        late = [each for each, since in self._idle_since.items() if now - since > IDLE_S]
        assert not late, f"idle beside rows that wait: {late}"

    def _sent(self, rows: int) -> int:
        """So many rows were sent: where messages are slow some slots are free although rows go there."""
        return rows

    def _check(self, request: Request) -> None:
        whole, error = request.expected(), request.error
        told = f"{request}"
        assert request.tokens == whole[: len(request.tokens)], told
        if request.ended_at is None:
            self.outcomes["gateway lost"] += 1
            return
        self.outcomes["finished" if error is None else type(error).__name__] += 1
        if error is None:
            assert (request.tokens, request.finished) == (whole, 1), told
        elif isinstance(error, errors.Cancelled):
            assert request.leaves_s is not None, told
        elif isinstance(error, errors.DeadlinePassed):
            waited_s = request.ended_at - request.asked_at
            early_s = request.timeout_s - waited_s
            assert -LATE_S <= early_s < ROUNDING_S, told
        else:
            assert isinstance(error, TYPED), told

    def _leftovers(self) -> list[str]:
        """What is kept although nobody waits for anything."""
        left = []
        for gateway in self.gateways:
            kept = (len(gateway.registry), gateway.registry.by_run, gateway.dispatch._runs)
            left += [f"{gateway.process.name}: {kept}"] * any(kept)
        for batcher in self.batchers:
            left += [f"{batcher.process.name}: it starts"] * (batcher.batcher is None)
            for model in batcher.batcher.loops.values() if batcher.batcher else ():
                requests = model.table.requests
                left += [f"{batcher.process.name}: {sorted(requests)}"] * bool(requests)
        for url, triton in self.tritons.items():
            left += [f"{url}: rows"] * (
                triton.worker is None or triton.worker.engine.has_sequences()
            )
        return left
