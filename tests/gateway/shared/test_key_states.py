"""The state machine of shared keys under random interleavings and deaths, with a bucket and peers in memory."""

import asyncio
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.shared.keys import SharedKeys
from sluice.errors import Cancelled, IdempotencyConflict, TransportUnavailable
from sluice.internal.v1.gateway_pb2 import GatewayReply, KeyRecord, StoredAnswer
from sluice.v1.inference_pb2 import Finished, Started

KEY: Final = "tenant key"
STEPS: Final = 30


@dataclass
class World:
    """One bucket, and who is alive."""

    dice: Random
    stored: dict[str, tuple[KeyRecord, int]] = field(default_factory=dict)
    revision: int = 0
    gateways: dict[str, "Gateway"] = field(default_factory=dict)
    deaths: int = 0

    async def pause(self) -> None:
        for _ in range(self.dice.randrange(4)):
            await asyncio.sleep(0)


class MemoryBucket:
    """As `Bucket`; the answer of a write may come long after the write."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def write(self, key: str, record: KeyRecord, last: int, ttl_s: float) -> int | None:
        await self._world.pause()
        now = self._world.stored.get(key, (None, 0))[1]
        written = now == last
        if written:
            self._world.revision += 1
            self._world.stored[key] = record, self._world.revision
        revision = self._world.revision
        await self._world.pause()
        return revision if written else None

    async def read(self, key: str, kind: object) -> tuple[KeyRecord, int] | None:
        await self._world.pause()
        found = self._world.stored.get(key)
        await self._world.pause()
        return found

    async def remove(self, revision: int) -> None:
        await self._world.pause()
        for key, (_, at) in list(self._world.stored.items()):
            if at == revision:
                del self._world.stored[key]


@dataclass
class MemoryStream:
    answer: str
    gateway: "Gateway"
    finished: Finished | None = None

    def fail(self, error: object) -> None:
        self.gateway.end(finished=None)

    def record(self) -> KeyRecord:
        assert self.finished is not None
        started = Started(request_id=self.answer)
        return KeyRecord(
            fingerprint=b"f", answer=StoredAnswer(started=started, finished=self.finished)
        )


class Gateway:
    """As far as keys go: registry, its replays and peers are itself."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.gateway_id = world, name
        self.streams: dict[str, MemoryStream] = {}
        self.by_key = self.streams
        self.kept: str | None = None
        self.alive = True
        this: Any = self
        self.replays = this
        self.keys = SharedKeys(this, MemoryBucket(world), this, 60.0)  # type: ignore[arg-type]

    def put(self, key: str, record: KeyRecord, now: float) -> None:
        self.kept = record.answer.started.request_id

    async def query(self, gateway: str, query: Any) -> GatewayReply | None:
        await self.world.pause()
        owner = self.world.gateways[gateway]
        if not owner.alive:
            return None
        answer: GatewayReply = await owner.keys.hand_over(query.hand_over)
        await self.world.pause()
        return answer

    async def request(self, number: int, fingerprint: bytes = b"f") -> str:
        """What a call of Generate does: the answer of the key, or a new stream."""

        def find() -> str | None:
            if KEY in self.streams:
                return "joined"
            return None if self.kept is None else f"replayed {self.kept}"

        async def begin() -> str:
            await self.world.pause()  # admission
            self.keys.check_claim(KEY)
            self.streams[KEY] = MemoryStream(f"{self.gateway_id}-{number}", self)
            return "opened"

        request: Any = SimpleNamespace(
            key=KEY, fingerprint=fingerprint, key_is_shared=True, timeout_s=10.0
        )
        try:
            return await self.keys.run_once(request, f"{number}", find, begin)
        except Cancelled:
            return "displaced"
        except TransportUnavailable:
            return "again"

    def end(self, finished: Finished | None) -> None:
        stream = self.streams.pop(KEY, None)
        if stream is not None:
            stream.finished = finished
            self.keys.on_end(KEY, stream)  # type: ignore[arg-type]
            if finished is not None:
                self.kept = stream.answer

    def die(self) -> None:
        """Another process takes its place; its tasks go on, as those of a process that was only stopped."""
        self.alive = False


async def run(seed: int) -> World:
    world = World(Random(seed))
    names = [f"gw{number}" for number in range(3)]
    world.gateways = {name: Gateway(world, name) for name in names}
    calls: list[asyncio.Task[str]] = []
    dead: list[Gateway] = []
    for number in range(STEPS):
        gateway = world.gateways[world.dice.choice(names)]
        match world.dice.randrange(8):
            case 0 | 1 | 2 | 3:
                calls.append(asyncio.ensure_future(gateway.request(number)))
            case 4:
                gateway.end(Finished())
            case 5:
                gateway.end(None)
            case 6 if world.deaths < 2:
                world.deaths += 1
                gateway.die()
                dead.append(gateway)
                name = f"{gateway.gateway_id}{world.deaths}"
                names[names.index(gateway.gateway_id)] = name
                world.gateways[name] = Gateway(world, name)
        await world.pause()
        living = [one for one in world.gateways.values() if one.alive and KEY in one.streams]
        assert len(living) <= 1, "two gateways compute the same key"
    await asyncio.gather(*calls)
    await asyncio.gather(*(one.keys.close() for one in world.gateways.values()))
    return world


@given(st.integers(0, 2**32))
def test_one_gateway_computes_a_key_and_no_key_is_stuck(seed: int) -> None:
    async def scenario() -> None:
        world = await run(seed)
        owner = next(one for one in world.gateways.values() if one.alive)
        said = await owner.request(STEPS)
        assert said in ("joined", "opened") or said.startswith("replayed")
        if said == "opened":
            owner.end(Finished())
            await owner.keys.close()
            ((record, _),) = world.stored.values()
            assert record.answer.started.request_id == f"{owner.gateway_id}-{STEPS}"

    asyncio.run(scenario())


@given(st.integers(0, 2**32))
def test_a_complete_answer_stays_the_answer(seed: int) -> None:
    async def scenario() -> None:
        world = await run(seed)
        stored = [record for record, _ in world.stored.values() if record.HasField("answer")]
        for one in world.gateways.values():
            if stored and one.alive and one.kept is None and KEY not in one.streams:
                said = await one.request(STEPS)
                assert said == f"replayed {stored[0].answer.started.request_id}"

    asyncio.run(scenario())


def test_a_key_of_another_request_is_a_conflict() -> None:
    async def scenario() -> None:
        world = World(Random(1))
        world.gateways = {name: Gateway(world, name) for name in ("gw1", "gw2")}
        one, two = world.gateways.values()
        assert await one.request(1) == "opened"
        with pytest.raises(IdempotencyConflict):
            await two.request(1, b"other")
        assert KEY in one.streams

    asyncio.run(scenario())


def asked(fingerprint: bytes = b"f") -> Any:
    """A request with a key that no other gateway gets."""
    return SimpleNamespace(key=KEY, fingerprint=fingerprint, key_is_shared=False)


async def test_calls_of_a_key_wait_for_the_first_one() -> None:
    gateway, may_end = Gateway(World(Random(1)), "gw1"), asyncio.Event()
    began: list[str] = []
    opened: list[str] = []

    async def begin(name: str) -> str:
        began.append(name)
        await may_end.wait()
        opened.append(name)
        return name

    def call(name: str, fingerprint: bytes = b"f") -> "asyncio.Task[str]":
        def find() -> str | None:
            return opened[0] if opened else None

        once = gateway.keys.run_once(asked(fingerprint), name, find, lambda: begin(name))
        return asyncio.ensure_future(once)

    first, second = call("first"), call("second")
    with pytest.raises(IdempotencyConflict):
        await call("other", b"other")
    assert began == ["first"]
    may_end.set()
    assert [await first, await second] == ["first", "first"]


async def test_when_the_first_call_leaves_the_next_one_begins() -> None:
    gateway = Gateway(World(Random(1)), "gw1")
    began: list[str] = []

    async def begin(name: str) -> str:
        began.append(name)
        if name == "first":
            await asyncio.Event().wait()
        return name

    def call(name: str) -> "asyncio.Task[str]":
        once = gateway.keys.run_once(asked(), name, lambda: None, lambda: begin(name))
        return asyncio.ensure_future(once)

    first, second = call("first"), call("second")
    await asyncio.wait([first], timeout=0)
    first.cancel()
    assert await second == "second"
    assert began == ["first", "second"]
