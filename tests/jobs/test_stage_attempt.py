"""An attempt at a stage: each outcome is written once, whatever comes in which order."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import nats
import pytest
from opentelemetry.trace import NoOpTracer

from jobs.answers import DedupeCache
from jobs.core.work import JobWork
from jobs.gateways import GatewayClient
from jobs.items import Item
from jobs.process import JobProcess, JobStopped
from jobs.results import OrderedLog
from jobs.sources import Block
from jobs.stage_attempt import OUTCOME_BYTES_MAX, UNWRITTEN_MAX, StageAttempt, answer_of
from jobs.store import SEGMENT_BYTES_MAX, Fenced, JobStore
from sluice.errors import (
    InternalError,
    InvalidRequest,
    SluiceError,
    TransportUnavailable,
    Unauthenticated,
)
from sluice.internal.v1.items_pb2 import RunResponse
from sluice.internal.v1.job_pb2 import ItemOutcome, JobCheckpoint, JobRecord, JobSegment
from sluice.settings import JobsSettings
from sluice.telemetry.instruments import Instruments
from sluice.v1 import inference_pb2
from sluice.v1 import jobs_pb2 as pb
from tests.jobs.gateway_double import GatewayDouble
from tests.jobs.processes import BOUND_S

JOB = "job-1"


@dataclass
class World:
    """A store, a gateway, and passes over the job."""

    store: JobStore
    gateways: GatewayClient
    cache: DedupeCache
    process: JobProcess = field(init=False)

    def __post_init__(self) -> None:
        self.process = JobProcess(
            "me", JobsSettings(), self.store, self.gateways, NoOpTracer(), Instruments()
        )

    def record(self, job: str = JOB, **spec: Any) -> JobRecord:
        return JobRecord(job=pb.Job(id=job, tenant="acme", spec=pb.JobSpec(model="echo", **spec)))

    def attempt(
        self, record: JobRecord | None = None, stage: int = 0, cache: DedupeCache | None = None
    ) -> StageAttempt:
        record = record or self.record()
        metadata = (("sluice-tenant", record.job.tenant),)
        work = JobWork(record.use)
        running = StageAttempt(self.process, record, stage, metadata, cache or self.cache, work)
        running.set_concurrency(64)
        return running

    async def loaded(self, record: JobRecord | None = None, **options: Any) -> StageAttempt:
        running = self.attempt(record, **options)
        await running.load()
        return running

    async def log(self, stage: int = 0, attempt: int = 0, job: str = JOB) -> list[ItemOutcome]:
        """Outcomes that were written."""
        written = OrderedLog(self.store, job, stage, attempt)
        return [one async for one in written.read(past_gaps=True)]

    async def texts(self) -> dict[int, str]:
        answered = [one for one in await self.log() if one.result.HasField("answer")]
        return {one.position: one.result.answer.text for one in answered}

    async def segments(self, job: str = JOB) -> list[JobSegment]:
        found, sequence = [], 1
        while (one := await self.store.segment_at(job, 0, 0, sequence)) is not None:
            found.append(one[0])
            sequence = one[1] + 1
        return found


@pytest.fixture
async def world(nats_url: str, gateway: GatewayDouble) -> AsyncIterator[World]:
    client = await nats.connect(nats_url)
    store = JobStore(JobsSettings(), 1)
    await store.start(client)
    gateways = GatewayClient(gateway.address)
    with DedupeCache() as cache:
        yield World(store, gateways, cache)
    await gateways.close()
    await client.close()


@pytest.fixture
async def idle() -> AsyncIterator[World]:
    """A world without NATS and gateways, for what needs neither."""
    gateways = GatewayClient("127.0.0.1:1")
    with DedupeCache() as cache:
        yield World(JobStore(JobsSettings(), 1), gateways, cache)
    await gateways.close()


def entry(position: int, prompt: str = "", **fields: Any) -> Item:
    request = inference_pb2.GenerateRequest(prompt=prompt or f"prompt {position}", model="echo")
    return Item(f"i{position}", position + 1, request, index=position, position=position, **fields)


def outcome(position: int, *, carried: bool = False, **result: Any) -> ItemOutcome:
    shown = pb.JobResult(index=position, **result)
    return ItemOutcome(position=position, carried=carried, result=shown)


def dead(position: int, reason: str = "BAD_LINE") -> ItemOutcome:
    return outcome(position, error=pb.JobItemError(reason=reason))


def bad(position: int, reason: str = "BAD_LINE") -> Item:
    item = entry(position)
    item.fail(reason, "")
    return item


def without_bytes(counts: pb.JobProgress) -> pb.JobProgress:
    found = pb.JobProgress()
    found.CopyFrom(counts)
    found.ClearField("output_bytes")
    found.ClearField("error_bytes")
    return found


async def blocks(*given: Block) -> AsyncIterator[Block]:
    for block in given:
        yield block


async def run(running: StageAttempt, *given: Block, skipped: int = 0) -> None:
    async with asyncio.timeout(BOUND_S):
        await running.run(blocks(*given), skipped)


def answered(text: str = "x", prompt_tokens: int = 3, completion_tokens: int = 2) -> RunResponse:
    usage = inference_pb2.Usage(
        prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cached_prompt_tokens=1
    )
    answer = inference_pb2.GenerateTextResponse(text=text)
    answer.finished.CopyFrom(inference_pb2.Finished(usage=usage, model="echo"))
    return RunResponse(answer=answer, cost=0.5)


def failed(error: SluiceError) -> RunResponse:
    return RunResponse(error=error.to_status().SerializeToString())


def respond(running: StageAttempt, item: Item, response: RunResponse, *later: Item) -> None:
    """Put an item in flight, with ``later`` behind it, and let it be answered."""
    running.window.add([item, *later])
    assert running.window.next_item(time.monotonic()) is item
    running.on_response(item, response)


# From the first item to the last.


async def test_every_item_and_bad_line_has_one_outcome(
    world: World, gateway: GatewayDouble
) -> None:
    running = await world.loaded(world.record(limits=pb.JobLimits(max_bad_line_share=0.5)))
    await run(running, [entry(0), bad(1), entry(2)], [entry(3), entry(4)])
    assert sorted(one.position for one in await world.log()) == [0, 1, 2, 3, 4]
    assert await world.texts() == {n: f"PROMPT {n}" for n in (0, 2, 3, 4)}
    point = running.log.checkpoint
    assert (running.items_read, running.is_input_read, point.low_water) == (5, True, 5)
    assert without_bytes(point.counts) == pb.JobProgress(
        total=5, succeeded=4, dead=1, bad_lines=1, prompt_tokens=8, completion_tokens=8, cost=2.0
    )
    assert dict(point.dead_by_reason) == {"BAD_LINE": 1}
    *_, last = await world.segments()
    assert (last.checkpoint.complete, last.checkpoint.writer) == (True, "me")

    # Who takes it over finds nothing to do.
    again = await world.loaded()
    await run(again, [entry(0)])
    await again.flush()
    assert set(gateway.asked.values()) == {1}
    assert (again.log.done.low_water, again.log.checkpoint) == (5, point)
    assert len(await world.log()) == 5


async def test_who_takes_over_sends_what_has_no_outcome_alone(
    world: World, gateway: GatewayDouble
) -> None:
    first = await world.loaded()
    for position in (0, 1, 3):
        respond(first, entry(position), answered(f"first {position}"))
    await first.flush()

    second = await world.loaded()
    assert (second.log.done.low_water, second.log.done.ranges) == (2, [3, 4])
    await run(second, [entry(2), entry(3), entry(4)], skipped=2)
    assert dict(gateway.asked) == {"prompt 2": 1, "prompt 4": 1}
    assert second.items_read == 5
    texts = {0: "first 0", 1: "first 1", 3: "first 3", 2: "PROMPT 2", 4: "PROMPT 4"}
    assert await world.texts() == texts
    counts = second.log.checkpoint.counts
    assert (counts.total, counts.succeeded, counts.cost) == (5, 5, 2.5)

    # What the first one still writes is refused.
    respond(first, entry(2), answered("late"))
    with pytest.raises(Fenced):
        await first.flush()
    assert len(await world.log()) == 5


async def test_a_checkpoint_has_all_that_goes_on(world: World) -> None:
    record = world.record()
    record.epoch = 7
    first = await world.loaded(record)
    first.register(bad(2))
    first.log.add(dead(5, "OTHER"))
    first.log.add(outcome(6, parts=2, answer=pb.JobAnswer()))
    await first.flush()
    *_, last = await world.segments()
    assert last.checkpoint == JobCheckpoint(
        low_water=0,
        done=[2, 3, 5, 7],
        counts=first.log.checkpoint.counts,
        dead_by_reason={"BAD_LINE": 1, "OTHER": 1},
        writer="me",
        epoch=7,
        split_documents=1,
    )
    second = await world.loaded(record)
    assert second.log.checkpoint == first.log.checkpoint
    assert (second.bad_lines, second.log.sequence > first.log.sequence) == (1, True)
    assert [position for position in range(9) if position in second.log.done] == [2, 5, 6]


async def test_identical_items_are_computed_once(world: World, gateway: GatewayDouble) -> None:
    first = await world.loaded()
    respond(first, entry(0, input_hash=b"h"), answered("known"))
    await first.flush()
    with DedupeCache() as cache:
        second = await world.loaded(cache=cache)
        hashes = {1: b"a", 2: b"a", 3: b"", 4: b"b"}
        given = [entry(position, "same", input_hash=one) for position, one in hashes.items()]
        await run(second, [*given], skipped=1)
        answer = cache.get(b"h")
        assert answer is not None
        assert answer.text == "known"
    assert gateway.asked["same"] == 3
    shared = {one.position: one.result.answer for one in await world.log()}
    assert [position for position, answer in shared.items() if answer.deduplicated] == [2]
    assert (shared[2].cost, shared[1].cost) == (0.0, 0.5)
    counts = second.log.checkpoint.counts
    assert (counts.deduplicated, counts.saved_tokens) == (1, 3)


async def test_answers_are_reused_within_the_tenant_only(
    world: World, gateway: GatewayDouble
) -> None:
    for job, tenant, attempt in (("mine", "acme", 1), ("theirs", "other", 0)):
        record = world.record(job)
        record.job.tenant, record.attempt = tenant, attempt
        assert await world.store.create(record)
        for number in range(attempt + 1):
            record.attempt = number
            running = await world.loaded(record)
            name = f"{job} {number}"
            respond(running, entry(number, input_hash=name.encode()), answered(name))
            await running.flush()
    names = ("mine 0", "mine 1", "theirs 0")
    given = [entry(position, one, input_hash=one.encode()) for position, one in enumerate(names)]
    dedupe = pb.JobDedupe(reuse_job_ids=["mine", "theirs", "deleted"])
    with DedupeCache() as world.cache:
        await run(await world.loaded(world.record(dedupe=dedupe)), [*given])
    assert dict(gateway.asked) == {"theirs 0": 1}
    assert await world.texts() == {0: "mine 0", 1: "mine 1", 2: "THEIRS 0"}


@pytest.mark.parametrize(
    ("disabled", "stage", "known"),
    [(False, 0, [b"h"]), (True, 0, []), (False, 1, [])],
    ids=["shared", "disabled", "a-later-stage"],
)
async def test_which_answers_are_loaded_for_later_items(
    world: World, disabled: bool, stage: int, known: list[bytes]
) -> None:
    first = await world.loaded()
    respond(first, entry(0, input_hash=b"h"), answered())
    respond(first, entry(1, input_hash=b"dead"), failed(InvalidRequest.of("prompt", "x")))
    respond(first, entry(2), answered())
    await first.flush()
    with DedupeCache() as cache:
        record = world.record(dedupe=pb.JobDedupe(disabled=disabled))
        await world.attempt(record, stage, cache).load_answers([record])
        assert [one for one in (b"h", b"dead", b"") if cache.get(one) is not None] == known


async def test_answers_behind_a_gap_are_loaded_segment_by_segment(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await world.loaded()
    for position in (1, 2):
        respond(first, entry(position, input_hash=bytes([position])), answered())
        await first.flush()
    steps, read = list[str](), world.store.segment_at

    async def reading(*place: Any) -> Any:
        steps.append("segment")
        return await read(*place)

    monkeypatch.setattr(world.store, "segment_at", reading)
    monkeypatch.setattr(world.cache, "put", lambda *_: steps.append("answer"))
    await world.attempt().load_answers([world.record()])
    assert steps == ["segment"] + ["segment", "answer"] * 2 + ["segment"]


async def test_error_of_a_loop_ends_the_attempt_and_keeps_outcomes(
    world: World, gateway: GatewayDouble
) -> None:
    running = await world.loaded()

    async def broken() -> AsyncIterator[Block]:
        yield [entry(0), bad(1)]
        async with asyncio.timeout(BOUND_S):
            while not gateway.asked or running.window.in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0)
        raise InvalidRequest.of("input", "cannot be read on")

    with pytest.raises(InvalidRequest):
        await running.run(broken())
    left = [str(task.get_coro()) for task in asyncio.all_tasks()]
    assert not [one for one in left if "StageAttempt" in one or "ItemCalls" in one]
    await running.flush()
    assert sorted(one.position for one in await world.log()) == [0, 1]
    assert not (await world.segments())[-1].checkpoint.complete
    assert not running.log.waiting


async def test_items_are_sent_again_when_their_gateway_is_away(
    world: World, gateway: GatewayDouble
) -> None:
    running = await world.loaded()
    item = entry(0)
    running.window.add([item])
    assert running.window.next_item(time.monotonic()) is item
    running.on_returned(item)
    assert (running.wait_reason, running.window.in_flight) == ("no gateway responds", 0)
    wait_s = running.window.wait_s(time.monotonic())
    assert wait_s is not None
    assert 0 < wait_s <= 0.25
    await run(running)
    assert (dict(gateway.asked), running.wait_reason) == ({"prompt 0": 1}, "")
    assert item.tries == 1


async def test_items_are_read_while_there_is_room_for_them(idle: World) -> None:
    running = idle.attempt()
    full: Block = [entry(position) for position in range(512)]
    feeding = asyncio.ensure_future(running.read_input(blocks(full, [entry(512)])))
    for _ in range(9):
        await asyncio.sleep(0)
    assert (running.items_read, running.is_input_read) == (512, False)
    assert running.window.next_item(time.monotonic()) is not None
    running.changed.notify()
    await asyncio.wait_for(feeding, BOUND_S)
    assert (running.items_read, running.is_input_read) == (513, True)


async def test_outcomes_of_a_moment_are_written_together(world: World) -> None:
    await run(await world.loaded(), [entry(position) for position in range(40)])
    sizes = [len(one.outcomes) for one in await world.segments()]
    assert sum(sizes) == 40
    assert len(sizes) < 10


async def test_while_too_much_is_unwritten_nothing_is_sent(
    world: World, gateway: GatewayDouble
) -> None:
    assert UNWRITTEN_MAX == 2048
    running = await world.loaded()
    running.window.add([entry(UNWRITTEN_MAX)])
    for position in range(UNWRITTEN_MAX):
        running.log.add(dead(position))
    loops = [asyncio.ensure_future(one) for one in (running.send_items(), running.calls.run())]
    for _ in range(20):
        await asyncio.sleep(0)
    assert running.window.in_flight == 0
    await running.log.append(running.log.take(), at_end=False)
    running.changed.notify()
    async with asyncio.timeout(BOUND_S):
        while not gateway.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)


async def test_so_many_items_are_in_flight_as_it_is_told(idle: World) -> None:
    running = idle.attempt()
    running.window.add([entry(0), entry(1), entry(2)])
    for concurrency in (1, 2):
        changed = asyncio.ensure_future(running.changed.wait())
        await asyncio.sleep(0)
        running.set_concurrency(concurrency)
        await asyncio.wait_for(changed, BOUND_S)
        assert running.window.next_item(time.monotonic()) is not None
        assert running.window.next_item(time.monotonic()) is None


@pytest.mark.parametrize(("timeout_ms", "timeout_s"), [(0, 3600.0), (1500, 1.5)])
async def test_timeout_of_an_item(idle: World, timeout_ms: int, timeout_s: float) -> None:
    limits = pb.JobLimits()
    limits.item_timeout.FromMilliseconds(timeout_ms)
    assert idle.attempt(idle.record(limits=limits)).timeout_s == timeout_s


# What becomes of an answer.


async def test_an_answer_is_that_of_all_items_like_it(idle: World) -> None:
    running = idle.attempt(idle.record(limits=pb.JobLimits(tokens_per_minute=60)))
    first, *others = (entry(position, input_hash=b"h") for position in range(3))
    respond(running, first, answered("x", 5, 6), *others)
    assert [one.result.attempts for one in running.log.waiting] == [1, 1, 1]
    answers = [one.result.answer for one in running.log.waiting]
    assert [(one.text, one.cost, one.deduplicated) for one in answers] == [
        ("x", 0.5, False),
        ("x", 0.0, True),
        ("x", 0.0, True),
    ]
    assert idle.cache.get(b"h") == answers[0]
    assert len(running.window) == 0
    later: Block = [entry(9, input_hash=b"h"), entry(10, input_hash=b"other"), entry(11)]
    await running.read_input(blocks(later))
    last = running.log.waiting[-1]
    assert (last.position, last.result.answer.deduplicated) == (9, True)
    assert len(running.window) == 2
    wait_s = running.window.wait_s(time.monotonic())
    assert wait_s is not None
    assert 9 < wait_s <= 11, "its 11 tokens count for the rate"


@pytest.mark.parametrize("over", [0, 1])
async def test_an_answer_that_is_too_large_is_a_dead_letter(idle: World, over: int) -> None:
    running, item, answer = idle.attempt(), entry(0), answer_of(answered(""))
    item.tries = 1
    answer.text = "x" * 196_000
    answer.text = "x" * (196_000 + 192 * 1024 - answer.ByteSize() + over)
    assert answer.ByteSize() == OUTCOME_BYTES_MAX + over
    running.settle(item, answer)
    (found,) = running.log.waiting
    assert found.result.HasField("error") == bool(over)
    if over:
        assert (found.result.error.code, found.result.error.reason) == (8, "RESULT_TOO_LARGE")
        assert "196609 bytes, over the limit of 196608" in found.result.error.message
    assert running.log.waiting_bytes == found.ByteSize()


async def test_permanent_failure_is_shared_by_identical_items(idle: World) -> None:
    running = idle.attempt()
    error = InvalidRequest.of("prompt", "y" * 2000)
    error.metadata["request_id"] = "req-1"
    respond(running, entry(0, input_hash=b"h"), failed(error), entry(1, input_hash=b"h"))
    assert [one.position for one in running.log.waiting] == [0, 1]
    for one in running.log.waiting:
        assert (one.result.attempts, one.result.error.reason) == (1, "REQUEST_INVALID")
        assert (one.result.error.code, len(one.result.error.message)) == (3, 1000)
        assert one.result.error.request_id == "req-1"
    assert (len(running.window), running.wait_reason) == (0, "")


async def test_an_error_that_passes_is_tried_as_often_as_the_job_says(idle: World) -> None:
    running, item = idle.attempt(idle.record(retries=pb.JobRetries(max_retries=1))), entry(0)
    respond(running, item, failed(InternalError("oops")))
    assert not running.log.waiting
    assert (len(running.window), running.window.in_flight, item.tries) == (1, 0, 1)
    running.on_response(item, failed(InternalError("oops")))
    (found,) = running.log.waiting
    assert found.result.attempts == 2
    assert found.result.error == pb.JobItemError(code=13, reason="INTERNAL", message="oops")


async def test_pass_stops_when_its_key_is_revoked(idle: World) -> None:
    running, item = idle.attempt(), entry(0)
    revoked = Unauthenticated.of("KEY_REVOKED", "the API key k was revoked: use another")
    respond(running, item, failed(revoked))
    assert (item.tries, running.log.waiting, len(running.window)) == (0, [], 1)
    with pytest.raises(JobStopped, match="revoked: use another; then resume the job with it"):
        await asyncio.wait_for(running.send_items(), BOUND_S)


async def test_no_room_in_the_mesh_is_no_try_and_is_told(idle: World) -> None:
    running, item = idle.attempt(idle.record(retries=pb.JobRetries(max_retries=0))), entry(0)
    respond(running, item, failed(TransportUnavailable("full", retry_after_s=20.0)))
    assert (item.tries, running.wait_reason, running.log.waiting) == (0, "full", [])
    wait_s = running.window.wait_s(time.monotonic())
    assert wait_s is not None
    assert wait_s > 15.0, "as long as the mesh said"


# Counting.


async def test_what_counts(idle: World) -> None:
    log = idle.attempt().log
    usage = inference_pb2.Usage(prompt_tokens=5, completion_tokens=6, cached_prompt_tokens=2)
    computed = pb.JobAnswer(usage=usage, cost=0.5)
    shared = pb.JobAnswer(usage=usage, deduplicated=True)
    log.earlier = {3: ("INTERNAL", 100), 9: ("INTERNAL", 100)}
    log.checkpoint.dead_by_reason["INTERNAL"] = 5
    for one in (
        outcome(0, answer=computed, attempts=1),
        outcome(1, answer=computed, attempts=2),
        outcome(2, answer=shared, attempts=1),
        outcome(3, error=pb.JobItemError(reason="OTHER"), attempts=3),
        dead(4, "DUPLICATE_ID"),
        outcome(5, answer=computed, attempts=2, carried=True),
        outcome(6, answer=shared, attempts=1, parts=2, part=0),
        outcome(7, answer=shared, attempts=1, parts=2, part=1),
        outcome(8, answer=shared, attempts=1, parts=1, part=0),
    ):
        log.count(one)
    assert without_bytes(log.checkpoint.counts) == pb.JobProgress(
        total=9,
        succeeded=7,
        dead=2,
        bad_lines=1,
        retried=1,
        deduplicated=4,
        saved_tokens=44,
        prompt_tokens=10,
        completion_tokens=12,
        cached_prompt_tokens=4,
        cost=1.0,
    )
    assert log.checkpoint.split_documents == 1
    reasons = {"INTERNAL": 4, "OTHER": 1, "DUPLICATE_ID": 1}
    assert dict(log.checkpoint.dead_by_reason) == reasons
    assert log.earlier == {9: ("INTERNAL", 100)}


async def test_what_was_read_and_what_has_an_outcome(idle: World) -> None:
    running = idle.attempt()
    running.log.done.add([0])
    assert not running.register(entry(0))
    fresh = entry(1, earlier_reason="INTERNAL", earlier_bytes=9)
    assert running.register(fresh)
    assert running.register(entry(2))
    for position, reason in ((3, "BAD_LINE"), (4, "INTERNAL"), (5, "DUPLICATE_ID")):
        assert not running.register(bad(position, reason))
    assert (running.items_read, running.bad_lines) == (6, 2)
    assert [one.position for one in running.log.waiting] == [3, 4, 5]
    assert running.log.earlier == {1: ("INTERNAL", 9)}


@pytest.mark.parametrize(
    ("read", "bad", "most", "stops"),
    [
        (100, 10, None, False),
        (100, 11, None, True),
        (99, 99, None, False),
        (200, 1, 0.0, True),
        (200, 0, 0.0, False),
        (200, 200, 1.0, False),
        (200, 101, 0.5, True),
        (200, 100, 0.5, False),
    ],
)
async def test_too_many_bad_lines_stop_a_job(
    idle: World, read: int, bad: int, most: float | None, stops: bool
) -> None:
    limits = pb.JobLimits() if most is None else pb.JobLimits(max_bad_line_share=most)
    for stage in (0, 1):
        running = idle.attempt(idle.record(limits=limits), stage)
        running.items_read, running.bad_lines = read, bad
        if not stops or stage:
            running.check_bad_lines(100)
            continue
        with pytest.raises(JobStopped, match=f"{bad} of the first {read} lines") as stopped:
            running.check_bad_lines(100)
        code, state = "TOO_MANY_BAD_LINES", pb.JOB_STATE_PAUSED
        assert (stopped.value.code, stopped.value.state) == (code, state)


@pytest.mark.parametrize(("lines", "ends"), [(1, True), (100, False)], ids=["at-the-end", "before"])
async def test_bad_lines_are_judged(world: World, lines: int, ends: bool) -> None:
    running, behind = await world.loaded(), asyncio.Event()

    async def given() -> AsyncIterator[Block]:
        yield [bad(position) for position in range(lines)]
        if not ends:
            await behind.wait()

    async with asyncio.timeout(BOUND_S):
        with pytest.raises(JobStopped, match=f"{lines} of the first {lines} lines"):
            await running.run(given())


# Writing.


@pytest.mark.parametrize(
    ("sizes", "taken"),
    [
        ([0] * 255, None),
        ([0] * 300, 256),
        ([150_000] * 9, 6),
        ([SEGMENT_BYTES_MAX // 2] * 3, 2),
        ([SEGMENT_BYTES_MAX // 2, SEGMENT_BYTES_MAX // 2 - 1], None),
    ],
    ids=["few", "by-count", "by-bytes", "just-its-bytes", "a-byte-less"],
)
async def test_a_segment_is_full(idle: World, sizes: Sequence[int], taken: int | None) -> None:
    log = idle.attempt().log
    for position, size in zip(reversed(range(len(sizes))), sizes, strict=True):
        one = outcome(position, answer=pb.JobAnswer(text="x" * max(0, size - 100)))
        one.result.answer.text += "x" * max(0, size - one.ByteSize())
        log.add(one)
    assert log.has_segment == (taken is not None)
    first = [one.position for one in log.take()]
    assert first == list(range(len(sizes)))[-(taken or len(sizes)) :], "the oldest, in order"
    assert log.waiting_bytes == sum(one.ByteSize() for one in log.waiting)
    assert (len(log.take()), log.waiting_bytes) == (len(sizes) - len(first), 0)


async def test_a_full_segment_is_written_at_once(idle: World) -> None:
    running, written = idle.attempt(), list[int]()

    async def append(outcomes: list[ItemOutcome], *, at_end: bool) -> None:
        written.append(len(outcomes))
        running.log.checkpoint.complete = True

    running.log.append = append  # type: ignore[method-assign]
    for position in range(256):
        running.log.add(dead(position))
    writing = asyncio.ensure_future(running.write_outcomes())
    for _ in range(3):
        await asyncio.sleep(0)
    assert written == [256]
    await writing


@dataclass
class StoreThatFails:
    """What `append` raises, in order, and what the log has as its last segment then."""

    errors: list[Exception | None]
    last: JobSegment | None = None
    appended: list[tuple[Any, ...]] = field(default_factory=list)

    async def append(self, *given: Any) -> int:
        self.appended.append(given)
        error = self.errors.pop(0)
        if error is not None:
            raise error
        return 17

    async def last_segment(self, *_: Any) -> tuple[JobSegment, int]:
        """Return the segment of another process, or the last one that was appended."""
        return self.last or self.appended[-1][3], 9


AWAY = TransportUnavailable("away")
THEIRS = JobSegment(checkpoint=JobCheckpoint(writer="other"))


@pytest.mark.parametrize(
    ("store", "tries", "sequence"),
    [
        (StoreThatFails([AWAY, AWAY, None]), 3, 17),
        (StoreThatFails([AWAY, Fenced("x")]), 2, 9),
        (StoreThatFails([Fenced("x")], THEIRS), 1, 4),
    ],
    ids=["away", "its-response-was-lost", "another-has-written"],
)
async def test_a_write_without_an_answer_is_made_again(
    idle: World, store: Any, tries: int, sequence: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.stage_log.RETRY_AFTER_S", 0.0)
    log, idle.process.store = idle.attempt().log, store
    log.sequence = 4
    try:
        await log.append([], at_end=False)
    except Fenced:
        assert store.last is THEIRS
    ours = JobSegment(checkpoint=JobCheckpoint(writer="me"))
    assert store.appended == [(JOB, 0, 0, ours, 4)] * tries
    assert log.sequence == sequence


async def test_the_end_is_written_when_nothing_is_left(world: World) -> None:
    running = await world.loaded()
    running.is_input_read = True
    running.log.add(dead(0))
    running.log.add(dead(1))
    for complete in (False, True):
        await running.log.append([running.log.waiting.pop(0)], at_end=running.is_at_end)
        assert running.log.checkpoint.complete == complete
    assert [one.checkpoint.complete for one in await world.segments()] == [False, False, True]
    other = await world.loaded(world.record("job-2"))
    other.is_input_read = True
    other.window.add([entry(0)])
    await other.log.append([], at_end=other.is_at_end)
    assert not other.log.checkpoint.complete
    # A place that was left out would be lost.
    lost = await world.loaded(world.record("job-3"))
    lost.is_input_read = True
    respond(lost, entry(5), answered())
    with pytest.raises(AssertionError, match="left out"):
        await lost.flush()


async def test_an_outcome_is_counted_and_shown_once(world: World) -> None:
    running = await world.loaded()
    running.log.add(outcome(0, answer=pb.JobAnswer(), carried=True))
    for position in (1, 2):
        running.log.add(outcome(position, answer=pb.JobAnswer()))
    await running.flush()
    assert dict(world.process.items) == {("succeeded",): 2}
    with pytest.raises(AssertionError, match="has an outcome already"):
        await running.log.append([outcome(1, answer=pb.JobAnswer())], at_end=False)
    assert running.log.checkpoint.counts.total == 3


async def test_a_flush_waits_for_the_write_that_was_stopped(world: World) -> None:
    running = await world.loaded()
    running.log.add(dead(0))
    writing = asyncio.ensure_future(running.log.append(running.log.take(), at_end=False))
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    assert writing.cancelled()
    running.log.add(dead(1))
    await running.flush()
    assert [one.position for one in await world.log()] == [0, 1]


def test_what_is_kept_of_an_answer() -> None:
    response = answered("x")
    response.answer.reasoning = "because"
    response.answer.started.request_id = "req-1"
    response.answer.started.model = "auto"
    response.answer.finished.reason = inference_pb2.FINISH_REASON_LENGTH
    response.answer.finished.rules.append("pii.email")
    response.answer.logprobs.add(logprob=-1.0)
    found = answer_of(response)
    assert found == pb.JobAnswer(
        request_id="req-1",
        model="echo",
        text="x",
        reasoning="because",
        finish_reason=inference_pb2.FINISH_REASON_LENGTH,
        usage=response.answer.finished.usage,
        rules=["pii.email"],
        logprobs=response.answer.logprobs,
        cost=0.5,
        finish_time=found.finish_time,
    )
    response.answer.finished.model = ""
    assert answer_of(response).model == "auto"


def test_what_is_kept_of_embeddings() -> None:
    embedded = inference_pb2.EmbedResponse(request_id="req-1", model="embed")
    embedded.usage.prompt_tokens = 4
    embedded.embeddings.add(values=b"1234")
    found = answer_of(RunResponse(embedded=embedded, cost=0.25))
    assert found == pb.JobAnswer(
        request_id="req-1",
        model="embed",
        finish_reason=inference_pb2.FINISH_REASON_STOP,
        usage=embedded.usage,
        cost=0.25,
        embeddings=embedded.embeddings,
        finish_time=found.finish_time,
    )
