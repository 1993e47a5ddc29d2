"""An attempt at a stage: each outcome is written once, whatever comes in which order."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import nats
import pytest
from opentelemetry.trace import NoOpTracer

from jobs.answers import DedupeCache
from jobs.change_signal import ChangeSignal
from jobs.core.retry import FailureKind
from jobs.gateways import GatewayClient
from jobs.items import Item
from jobs.process import JobProcess, JobStopped, input_unreadable
from jobs.results import OrderedLog
from jobs.sources import Block
from jobs.stage_attempt import OUTCOME_BYTES_MAX, UNWRITTEN_MAX, StageAttempt, answer_of
from jobs.stage_log import SEGMENT_ITEMS
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

BOUND_S = 60.0
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

    def new_attempt(
        self, record: JobRecord | None = None, stage: int = 0, cache: DedupeCache | None = None
    ) -> StageAttempt:
        record = record or self.record()
        metadata = (("sluice-tenant", record.job.tenant),)
        running = StageAttempt(self.process, record, stage, metadata, cache or self.cache)
        running.set_concurrency(64)
        return running

    async def log(self, stage: int = 0, attempt: int = 0, job: str = JOB) -> list[ItemOutcome]:
        """Outcomes as they were written."""
        return [one async for one in OrderedLog(self.store, job, stage, attempt).everything()]

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


def without_bytes(counts: pb.JobProgress) -> pb.JobProgress:
    found = pb.JobProgress()
    found.CopyFrom(counts)
    found.ClearField("output_bytes")
    found.ClearField("error_bytes")
    return found


def bad_line_outcome(position: int, reason: str = "BAD_LINE") -> ItemOutcome:
    result = pb.JobResult(index=position, error=pb.JobItemError(reason=reason))
    return ItemOutcome(position=position, result=result)


async def blocks(*given: Block) -> AsyncIterator[Block]:
    for block in given:
        yield block


def answered(text: str = "x", prompt_tokens: int = 3, completion_tokens: int = 2) -> RunResponse:
    usage = inference_pb2.Usage(
        prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cached_prompt_tokens=1
    )
    answer = inference_pb2.GenerateTextResponse(text=text)
    answer.finished.CopyFrom(inference_pb2.Finished(usage=usage, model="echo"))
    return RunResponse(answer=answer, cost=0.5)


def failed(error: SluiceError) -> RunResponse:
    return RunResponse(error=error.to_status().SerializeToString())


def send(running: StageAttempt, item: Item, *later: Item) -> None:
    """Put an item in flight; ``later`` come behind it."""
    running.window.add([item, *later])
    assert running.window.next_item(time.monotonic()) is item


def respond(running: StageAttempt, item: Item, response: RunResponse) -> None:
    send(running, item)
    running.on_response(item, response)


# From the first item to the last.


async def test_every_item_and_bad_line_has_one_outcome(
    world: World, gateway: GatewayDouble
) -> None:
    running = world.new_attempt(world.record(limits=pb.JobLimits(max_bad_line_share=0.5)))
    await running.load()
    given = [[entry(0), bad_line_outcome(1), entry(2)], [entry(3), entry(4)]]
    async with asyncio.timeout(BOUND_S):
        await running.run(blocks(*given))
    log = await world.log()
    assert sorted(one.position for one in log) == [0, 1, 2, 3, 4]
    texts = {one.position: one.result.answer.text for one in log if one.result.HasField("answer")}
    assert texts == {position: f"PROMPT {position}" for position in (0, 2, 3, 4)}
    assert (running.items_read, running.is_input_read, running.log.done.low_water) == (5, True, 5)
    assert without_bytes(running.log.counts) == pb.JobProgress(
        total=5, succeeded=4, dead=1, bad_lines=1, prompt_tokens=8, completion_tokens=8, cost=2.0
    )
    assert dict(running.log.reasons) == {"BAD_LINE": 1}
    *_, last = await world.segments()
    assert last.checkpoint.complete
    assert last.checkpoint.writer == "me"

    # Who takes it over finds nothing to do.
    again = world.new_attempt()
    await again.load()
    await again.run(blocks([entry(0)]))
    await again.flush()
    assert set(gateway.asked.values()) == {1}
    assert (again.log.done.low_water, again.log.counts) == (5, running.log.counts)
    assert len(await world.log()) == 5


async def test_who_takes_over_sends_what_has_no_outcome_alone(
    world: World, gateway: GatewayDouble
) -> None:
    first = world.new_attempt()
    await first.load()
    for position in (0, 1, 3):
        respond(first, entry(position), answered(f"first {position}"))
    await first.flush()

    second = world.new_attempt()
    await second.load()
    assert (second.log.done.low_water, second.log.done.ranges) == (2, [3, 4])
    async with asyncio.timeout(BOUND_S):
        await second.run(blocks([entry(2), entry(3), entry(4)]), skipped=2)
    assert dict(gateway.asked) == {"prompt 2": 1, "prompt 4": 1}
    assert second.items_read == 5
    texts = {one.position: one.result.answer.text for one in await world.log()}
    assert texts == {0: "first 0", 1: "first 1", 3: "first 3", 2: "PROMPT 2", 4: "PROMPT 4"}
    assert (second.log.counts.total, second.log.counts.succeeded, second.log.counts.cost) == (
        5,
        5,
        2.5,
    )

    # What the first one still writes is refused.
    respond(first, entry(2), answered("late"))
    with pytest.raises(Fenced):
        await first.flush()
    assert len(await world.log()) == 5


async def test_a_process_that_loads_keeps_the_one_before_from_writing(world: World) -> None:
    first, second = world.new_attempt(), world.new_attempt()
    await first.load()
    await second.load()
    first.log.add(bad_line_outcome(0))
    with pytest.raises(Fenced):
        await first.flush()
    second.log.add(bad_line_outcome(0))
    await second.flush()
    assert [one.position for one in await world.log()] == [0]
    *_, last = await world.segments()
    assert last.checkpoint.epoch == 0


async def test_a_checkpoint_has_all_that_goes_on(world: World) -> None:
    record = world.record()
    record.epoch = 7
    first = world.new_attempt(record)
    await first.load()
    first.register(bad_line_outcome(2))
    first.log.add(bad_line_outcome(5, "OTHER"))
    part = ItemOutcome(position=6, result=pb.JobResult(index=6, parts=2, answer=pb.JobAnswer()))
    first.log.add(part)
    await first.flush()
    assert first.log.done.low_water == 0
    *_, last = await world.segments()
    assert last.checkpoint == JobCheckpoint(
        low_water=0,
        done=[2, 3, 5, 7],
        counts=first.log.counts,
        dead_by_reason={"BAD_LINE": 1, "OTHER": 1},
        writer="me",
        epoch=7,
        split_documents=1,
    )
    second = world.new_attempt()
    await second.load()
    assert second.log.counts == first.log.counts
    assert second.log.reasons == {"BAD_LINE": 1, "OTHER": 1}
    assert (
        second.log.split_documents,
        second.bad_lines,
        second.log.sequence > first.log.sequence,
    ) == (1, 1, True)
    assert [position for position in range(9) if position in second.log.done] == [2, 5, 6]


async def test_identical_items_are_computed_once(world: World, gateway: GatewayDouble) -> None:
    first = world.new_attempt()
    await first.load()
    respond(first, entry(0, input_hash=b"h"), answered("known"))
    await first.flush()
    with DedupeCache() as cache:
        second = world.new_attempt(cache=cache)
        second.set_concurrency(64)
        await second.load()
        hashes = {1: b"a", 2: b"a", 3: b"", 4: b"b"}
        given = [entry(position, "same", input_hash=one) for position, one in hashes.items()]
        async with asyncio.timeout(BOUND_S):
            await second.run(blocks(given), skipped=1)
        answer = cache.get(b"h")
        assert answer is not None
        assert answer.text == "known"
    assert gateway.asked["same"] == 3
    shared = {one.position: one.result.answer for one in await world.log()}
    assert [position for position, answer in shared.items() if answer.deduplicated] == [2]
    assert (shared[2].cost, shared[1].cost) == (0.0, 0.5)
    assert (second.log.counts.deduplicated, second.log.counts.saved_tokens) == (1, 3)


async def test_answers_are_reused_within_the_tenant_only(
    world: World, gateway: GatewayDouble
) -> None:
    for job, tenant, attempt in (("mine", "acme", 1), ("theirs", "other", 0)):
        record = world.record(job)
        record.job.tenant, record.attempt = tenant, attempt
        assert await world.store.create(record)
        for number in range(attempt + 1):
            record.attempt = number
            running = world.new_attempt(record)
            await running.load()
            name = f"{job} {number}"
            respond(running, entry(0, input_hash=name.encode()), answered(name))
            await running.flush()
    names = ("mine 0", "mine 1", "theirs 0")
    given = [entry(position, one, input_hash=one.encode()) for position, one in enumerate(names)]
    dedupe = pb.JobDedupe(reuse_job_ids=["mine", "theirs", "deleted"])
    with DedupeCache() as world.cache:
        running = world.new_attempt(world.record(dedupe=dedupe))
        await running.load()
        async with asyncio.timeout(BOUND_S):
            await running.run(blocks(given))
    assert dict(gateway.asked) == {"theirs 0": 1}
    texts = {one.position: one.result.answer.text for one in await world.log()}
    assert texts == {0: "mine 0", 1: "mine 1", 2: "THEIRS 0"}


@pytest.mark.parametrize(("disabled", "stage"), [(True, 0), (False, 1)])
async def test_where_nothing_is_shared_the_log_is_not_read(
    world: World, disabled: bool, stage: int
) -> None:
    first = world.new_attempt()
    await first.load()
    respond(first, entry(0, input_hash=b"h"), answered())
    await first.flush()
    with DedupeCache() as cache:
        record = world.record(dedupe=pb.JobDedupe(disabled=disabled))
        second = world.new_attempt(record, stage, cache)
        await second.load_answers([(JOB, 0)])
        assert cache.get(b"h") is None


async def test_dead_letters_and_answers_without_a_hash_are_not_shared(world: World) -> None:
    first = world.new_attempt()
    await first.load()
    respond(first, entry(0, input_hash=b"dead"), failed(InvalidRequest.of("prompt", "x")))
    respond(first, entry(1), answered())
    await first.flush()
    with DedupeCache() as cache:
        second = world.new_attempt(cache=cache)
        await second.load_answers([(JOB, 0)])
        assert cache.get(b"dead") is None
        assert cache.get(b"") is None
    assert world.cache.get(b"") is None


async def test_error_of_a_loop_ends_the_attempt_and_keeps_outcomes(
    world: World, gateway: GatewayDouble
) -> None:
    running = world.new_attempt()
    await running.load()

    async def broken() -> AsyncIterator[Block]:
        yield [entry(0), bad_line_outcome(1)]
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
    running = world.new_attempt()
    await running.load()
    item = entry(0)
    send(running, item)
    running.on_returned(item)
    assert running.wait_reason == "no gateway responds"
    assert running.window.in_flight == 0
    assert len(running.window) == 1
    async with asyncio.timeout(BOUND_S):
        await running.run(blocks())
    assert (dict(gateway.asked), running.wait_reason) == ({"prompt 0": 1}, "")
    assert item.tries == 1


async def test_items_are_read_while_there_is_room_for_them(idle: World) -> None:
    running, rooms = idle.new_attempt(), list[tuple[int, int]]()
    free = asyncio.Event()

    def has_room(low_water: int, read: int) -> bool:
        rooms.append((low_water, read))
        return free.is_set()

    running.window.has_room = has_room  # type: ignore[method-assign]
    feeding = asyncio.ensure_future(running.read_input(blocks([entry(0)], [entry(1)])))
    for _ in range(9):
        await asyncio.sleep(0)
    assert (rooms, running.items_read) == ([(0, 0)], 0)
    free.set()
    running.changed.notify()
    await asyncio.wait_for(feeding, BOUND_S)
    assert (rooms, running.items_read, running.is_input_read) == ([(0, 0), (0, 0), (0, 1)], 2, True)


async def test_each_block_and_the_end_notify_a_change(idle: World) -> None:
    running, woken = idle.new_attempt(), list[tuple[int, bool]]()
    running.changed.notify = lambda: woken.append((running.items_read, running.is_input_read))  # type: ignore[method-assign]
    await running.read_input(blocks([entry(0)], [entry(1)]))
    assert woken == [(1, False), (2, False), (2, True)]


async def test_whatever_comes_back_notifies_a_change(idle: World) -> None:
    running, woken = idle.new_attempt(), list[int]()
    running.changed.notify = lambda: woken.append(len(running.window))  # type: ignore[method-assign]
    items = [entry(position) for position in range(3)]
    running.window.add(items)
    for item in items:
        assert running.window.next_item(time.monotonic()) is item
    running.on_response(items[0], answered())
    running.on_response(items[1], failed(InvalidRequest.of("prompt", "x")))
    running.on_returned(items[2])
    assert woken == [2, 1, 1]


async def test_how_long_outcomes_wait_for_others(
    idle: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.stage_attempt.time.monotonic", lambda: 100.0)
    running, pauses = idle.new_attempt(), list[float | None]()

    async def pause(bound_s: float | None) -> None:
        pauses.append(bound_s)
        if len(pauses) == 2:
            running.is_input_read = True

    async def append(outcomes: list[ItemOutcome], *, at_end: bool) -> None:
        pauses.append(float(len(outcomes)))
        running.log.complete = True

    running.changed.wait, running.log.append = pause, append  # type: ignore[method-assign]
    running.log.add(bad_line_outcome(0))
    await running.write_outcomes()
    assert pauses == [0.25, 0.25, 1.0]


async def test_outcomes_are_written_after_the_commit_delay(
    idle: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, happened = 100.0, list[str]()
    monkeypatch.setattr("jobs.stage_attempt.time.monotonic", lambda: clock)
    running = idle.new_attempt()

    waited = asyncio.Event()

    async def pause(bound_s: float | None = None) -> None:
        nonlocal clock
        await waited.wait()
        if bound_s is not None:
            clock += 0.25
            happened.append("paused")

    async def append(outcomes: list[ItemOutcome], *, at_end: bool) -> None:
        happened.append(f"{len(outcomes)} written")
        running.log.complete = True

    running.changed.wait, running.log.append = pause, append  # type: ignore[method-assign]
    writing = asyncio.ensure_future(running.write_outcomes())
    for _ in range(5):
        await asyncio.sleep(0)
    assert happened == []
    running.log.add(bad_line_outcome(0))
    waited.set()
    await asyncio.wait_for(writing, BOUND_S)
    assert happened == ["paused", "1 written"]


async def test_a_full_segment_is_written_at_once(idle: World) -> None:
    running, written = idle.new_attempt(), list[int]()

    async def append(outcomes: list[ItemOutcome], *, at_end: bool) -> None:
        written.append(len(outcomes))
        running.log.complete = True

    async def pause(_: float | None) -> None:
        pytest.fail("nothing is waited for")

    running.changed.wait, running.log.append = pause, append  # type: ignore[method-assign]
    for position in range(SEGMENT_ITEMS):
        running.log.add(bad_line_outcome(position))
    changed = asyncio.ensure_future(ChangeSignal.wait(running.changed, BOUND_S))
    await asyncio.sleep(0)
    await running.write_outcomes()
    assert written == [SEGMENT_ITEMS]
    await asyncio.wait_for(changed, BOUND_S)


async def test_while_no_gateway_is_there_items_wait_a_moment(
    idle: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.stage_attempt.time.monotonic", lambda: 100.0)
    running, returned = idle.new_attempt(), list[tuple[int, float]]()
    sent = list[tuple[int, float | None]]()

    def send(item: Item, timeout_s: float | None) -> bool:
        sent.append((item.position, timeout_s))
        return item.position > 0

    running.calls.send = send  # type: ignore[method-assign]
    back = running.window.on_returned

    def note(item: Item, at: float) -> None:
        returned.append((item.position, at))
        back(item, at)

    running.window.on_returned = note  # type: ignore[method-assign]
    running.window.add([entry(0), entry(1)])
    changed = asyncio.ensure_future(running.changed.wait())
    sending = asyncio.ensure_future(running.send_items())
    for _ in range(9):
        await asyncio.sleep(0)
    assert sent == [(0, 3600.0), (1, 3600.0)]
    assert returned == [(0, 100.25)]
    await asyncio.wait_for(changed, BOUND_S)
    running.on_returned(entry(1))
    assert returned[1:] == [(1, 100.25)]
    sending.cancel()


async def test_change_signal_wakes_waiters_or_times_out() -> None:
    changed = ChangeSignal()
    await changed.wait(0.0)
    waiting = asyncio.ensure_future(changed.wait())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    changed.notify()
    await asyncio.wait_for(waiting, BOUND_S)


# What becomes of an answer.


async def test_an_answer_is_that_of_all_items_like_it(idle: World) -> None:
    running = idle.new_attempt()
    first, *others = (entry(position, input_hash=b"h") for position in range(3))
    send(running, first, *others)
    running.on_response(first, answered("x", 5, 6))
    assert [one.result.attempts for one in running.log.waiting] == [1, 1, 1]
    answers = [one.result.answer for one in running.log.waiting]
    assert [(one.text, one.cost, one.deduplicated) for one in answers] == [
        ("x", 0.5, False),
        ("x", 0.0, True),
        ("x", 0.0, True),
    ]
    kept = idle.cache.get(b"h")
    assert kept == answers[0]
    assert len(running.window) == 0
    await running.read_input(
        blocks([entry(9, input_hash=b"h"), entry(10, input_hash=b"other"), entry(11)])
    )
    assert running.log.waiting[-1].result.answer.deduplicated
    assert running.log.waiting[-1].position == 9
    assert len(running.window) == 2


async def test_tokens_that_were_computed_count_for_the_rate(idle: World) -> None:
    running = idle.new_attempt(idle.record(limits=pb.JobLimits(tokens_per_minute=60)))
    counted, consumed = running.window.on_answer, list[tuple[int, float]]()

    def on_answer(item: Item, tokens: int, cost: float) -> list[Item]:
        consumed.append((tokens, cost))
        return counted(item, tokens, cost)

    running.window.on_answer = on_answer  # type: ignore[method-assign]
    respond(running, entry(0), answered("x", 5, 6))
    assert consumed == [(11, 0.5)]


@pytest.mark.parametrize("over", [0, 1])
async def test_an_answer_that_is_too_large_is_a_dead_letter(idle: World, over: int) -> None:
    running = idle.new_attempt()
    item, answer = entry(0), answer_of(answered(""))
    item.tries = 1
    answer.text = "x" * 196_000
    answer.text = "x" * (196_000 + 192 * 1024 - answer.ByteSize() + over)
    assert answer.ByteSize() == OUTCOME_BYTES_MAX + over
    running.settle(item, answer)
    (outcome,) = running.log.waiting
    assert outcome.result.HasField("error") == bool(over)
    if over:
        assert (outcome.result.error.code, outcome.result.error.reason) == (8, "RESULT_TOO_LARGE")
        assert "196609 bytes, over the limit of 196608" in outcome.result.error.message
    assert running.log.waiting_bytes == outcome.ByteSize()


async def test_permanent_failure_is_shared_by_identical_items(idle: World) -> None:
    running = idle.new_attempt()
    item, like = entry(0, input_hash=b"h"), entry(1, input_hash=b"h")
    send(running, item, like)
    error = InvalidRequest.of("prompt", "y" * 2000)
    error.metadata["request_id"] = "req-1"
    running.on_response(item, failed(error))
    assert [one.position for one in running.log.waiting] == [0, 1]
    for one in running.log.waiting:
        assert (one.result.attempts, one.result.error.reason) == (1, "REQUEST_INVALID")
        assert (one.result.error.code, len(one.result.error.message)) == (3, 1000)
        assert one.result.error.request_id == "req-1"
    assert len(running.window) == 0
    assert running.wait_reason == ""


async def test_an_error_that_passes_is_tried_as_often_as_the_job_says(idle: World) -> None:
    running = idle.new_attempt(idle.record(retries=pb.JobRetries(max_retries=1)))
    item = entry(0)
    send(running, item)
    running.on_response(item, failed(InternalError("oops")))
    assert not running.log.waiting
    assert (len(running.window), running.window.in_flight, item.tries) == (1, 0, 1)
    running.on_response(item, failed(InternalError("oops")))
    (outcome,) = running.log.waiting
    assert outcome.result.attempts == 2
    assert outcome.result.error == pb.JobItemError(code=13, reason="INTERNAL", message="oops")


async def test_pass_stops_when_its_key_is_revoked(idle: World) -> None:
    running = idle.new_attempt()
    item = entry(0)
    send(running, item)
    revoked = Unauthenticated.of("KEY_REVOKED", "the API key k was revoked: use another")
    running.on_response(item, failed(revoked))
    assert (item.tries, running.log.waiting, len(running.window)) == (0, [], 1)
    with pytest.raises(JobStopped, match="revoked: use another; then resume the job with it"):
        await asyncio.wait_for(running.send_items(), BOUND_S)


async def test_an_error_without_a_time_to_retry_waits_for_the_jobs_own(idle: World) -> None:
    running, waits = idle.new_attempt(), list[float]()

    def fail(item: Item, kind: FailureKind, wait_s: float, now: float, dice: float) -> bool:
        waits.append(wait_s)
        return False

    running.window.on_failure = fail  # type: ignore[method-assign]
    for error in (InternalError("oops"), TransportUnavailable("full", retry_after_s=7.0)):
        running.on_response(entry(0), failed(error))
    assert waits == [0.0, 7.0]


async def test_no_room_in_the_mesh_is_no_try_and_is_told(idle: World) -> None:
    running = idle.new_attempt(idle.record(retries=pb.JobRetries(max_retries=0)))
    item = entry(0)
    send(running, item)
    running.on_response(item, failed(TransportUnavailable("full", retry_after_s=20.0)))
    assert (item.tries, running.wait_reason, running.log.waiting) == (0, "full", [])
    wait_s = running.window.wait_s(time.monotonic())
    assert wait_s is not None
    assert wait_s > 15.0, "as long as the mesh said"


# Counting.


def outcome(position: int, **result: Any) -> ItemOutcome:
    carried = result.pop("carried", False)
    return ItemOutcome(
        position=position, carried=carried, result=pb.JobResult(index=position, **result)
    )


async def test_what_counts(idle: World) -> None:
    running = idle.new_attempt()
    usage = inference_pb2.Usage(prompt_tokens=5, completion_tokens=6, cached_prompt_tokens=2)
    computed = pb.JobAnswer(usage=usage, cost=0.5)
    shared = pb.JobAnswer(usage=usage, deduplicated=True)
    running.log.earlier_reasons = {3: "INTERNAL", 9: "INTERNAL"}
    running.log.reasons.update({"INTERNAL": 5})
    for one in (
        outcome(0, answer=computed, attempts=1),
        outcome(1, answer=computed, attempts=2),
        outcome(2, answer=shared, attempts=1),
        outcome(3, error=pb.JobItemError(reason="OTHER"), attempts=3),
        outcome(4, error=pb.JobItemError(reason="DUPLICATE_ID")),
        outcome(5, answer=computed, attempts=2, carried=True),
        outcome(6, answer=shared, attempts=1, parts=2, part=0),
        outcome(7, answer=shared, attempts=1, parts=2, part=1),
        outcome(8, answer=shared, attempts=1, parts=1, part=0),
    ):
        running.log.count(one)
    assert without_bytes(running.log.counts) == pb.JobProgress(
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
    assert running.log.split_documents == 1
    assert dict(running.log.reasons) == {"INTERNAL": 4, "OTHER": 1, "DUPLICATE_ID": 1}
    assert running.log.earlier_reasons == {9: "INTERNAL"}


async def test_what_was_read_and_what_has_an_outcome(idle: World) -> None:
    running = idle.new_attempt()
    running.log.done.add([0])
    assert running.register(entry(0)) is None
    fresh = entry(1, earlier_reason="INTERNAL")
    assert running.register(fresh) is fresh
    assert running.register(entry(2)) is not None
    assert running.register(bad_line_outcome(3)) is None
    assert running.register(bad_line_outcome(4, "INTERNAL")) is None
    assert running.register(bad_line_outcome(5, "DUPLICATE_ID")) is None
    assert (running.items_read, running.bad_lines) == (6, 2)
    assert [one.position for one in running.log.waiting] == [3, 4, 5]
    assert running.log.earlier_reasons == {1: "INTERNAL"}


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
        running = idle.new_attempt(idle.record(limits=limits), stage)
        running.items_read, running.bad_lines = read, bad
        if stops and not stage:
            with pytest.raises(JobStopped) as stopped:
                running.check_bad_lines(100)
            assert str(stopped.value).startswith(f"{bad} of the first {read} lines")
            assert stopped.value.code == "TOO_MANY_BAD_LINES"
            assert stopped.value.state == pb.JOB_STATE_PAUSED
        else:
            running.check_bad_lines(100)


async def test_bad_lines_are_judged_while_it_reads_and_at_the_end(world: World) -> None:
    few = world.new_attempt()
    await few.load()
    with pytest.raises(JobStopped, match="1 of the first 1 lines"):
        await few.run(blocks([bad_line_outcome(0)]))
    many = world.new_attempt(world.record("job-2"))
    await many.load()
    behind = asyncio.Event()

    async def endless() -> AsyncIterator[Block]:
        yield [bad_line_outcome(position) for position in range(100)]
        await behind.wait()

    async with asyncio.timeout(BOUND_S):
        with pytest.raises(JobStopped, match="100 of the first 100 lines"):
            await many.run(endless())


# Writing.


async def test_a_segment_has_so_many_outcomes_in_order(idle: World) -> None:
    running = idle.new_attempt()
    for position in reversed(range(300)):
        assert running.log.has_segment == (position < 300 - 256)
        running.log.add(bad_line_outcome(position))
    assert running.log.has_segment
    first = running.log.take()
    assert [one.position for one in first] == list(range(44, 300))
    assert not running.log.has_segment
    assert running.log.waiting_bytes == sum(one.ByteSize() for one in running.log.waiting)
    assert [one.position for one in running.log.take()] == list(range(44))
    assert running.log.waiting_bytes == 0
    assert running.log.take() == []
    assert SEGMENT_ITEMS == 256


async def test_a_segment_is_full_by_bytes_too(idle: World) -> None:
    running = idle.new_attempt()
    for position in range(9):
        running.log.add(outcome(position, answer=pb.JobAnswer(text="x" * 150_000)))
    one = running.log.waiting[0].ByteSize()
    assert running.log.has_segment
    assert len(running.log.take()) == -(-SEGMENT_BYTES_MAX // one)
    assert not running.log.has_segment
    running.log.waiting_bytes = SEGMENT_BYTES_MAX
    assert running.log.has_segment
    running.log.waiting_bytes -= 1
    assert not running.log.has_segment


async def test_a_segment_of_just_its_bytes_is_full(idle: World) -> None:
    running = idle.new_attempt()
    for position in range(1, 4):
        half = outcome(position, answer=pb.JobAnswer(text="x" * 300_000))
        missing = SEGMENT_BYTES_MAX // 2 - half.ByteSize()
        half.result.answer.text += "x" * missing
        assert half.ByteSize() == SEGMENT_BYTES_MAX // 2
        running.log.add(half)
    assert [one.position for one in running.log.take()] == [1, 2]
    assert running.log.waiting_bytes == SEGMENT_BYTES_MAX // 2


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


async def test_a_write_without_an_answer_is_looked_for_and_made_again(
    idle: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses, pause = list[float](), asyncio.sleep

    async def sleep(delay_s: float) -> None:
        pauses.append(delay_s)
        await pause(0)

    running = idle.new_attempt()
    away = TransportUnavailable("away")
    theirs = JobSegment(checkpoint=JobCheckpoint(writer="other"))

    async def append(store: StoreThatFails) -> None:
        fake: Any = store
        idle.process.store = fake
        running.log.sequence = 4
        await running.log.append([], at_end=False)

    monkeypatch.setattr("jobs.stage_log.asyncio.sleep", sleep)
    store = StoreThatFails([away, away, None])
    await append(store)
    ours = JobSegment(checkpoint=JobCheckpoint(writer="me", counts=pb.JobProgress()))
    assert store.appended == [(JOB, 0, 0, ours, 4)] * 3
    assert (running.log.sequence, pauses) == (17, [0.5, 0.5])
    # The segment was stored, and the response was lost.
    store = StoreThatFails([away, Fenced("x")])
    await append(store)
    assert (running.log.sequence, len(store.appended)) == (9, 2)
    # Another one has written.
    with pytest.raises(Fenced):
        await append(StoreThatFails([Fenced("x")], theirs))
    assert running.log.sequence == 4


async def test_the_end_is_written_when_nothing_is_left(world: World) -> None:
    running = world.new_attempt()
    await running.load()
    running.is_input_read = True
    running.log.add(bad_line_outcome(0))
    running.log.add(bad_line_outcome(1))
    await running.log.append([running.log.waiting.pop(0)], at_end=running.is_at_end)
    assert not running.log.complete
    await running.log.append([running.log.waiting.pop(0)], at_end=running.is_at_end)
    assert running.log.complete
    assert [one.checkpoint.complete for one in await world.segments()] == [False, False, True]
    other = world.new_attempt(world.record("job-2"))
    await other.load()
    other.is_input_read = True
    other.window.add([entry(0)])
    await other.log.append([], at_end=other.is_at_end)
    assert not other.log.complete
    # A place that was left out would be lost.
    lost = world.new_attempt(world.record("job-3"))
    await lost.load()
    lost.is_input_read = True
    respond(lost, entry(5), answered())
    with pytest.raises(AssertionError, match="left out"):
        await lost.flush()


async def test_an_outcome_is_counted_and_shown_once(world: World) -> None:
    running = world.new_attempt()
    await running.load()
    running.log.add(outcome(0, answer=pb.JobAnswer(), carried=True))
    for position in (1, 2):
        running.log.add(outcome(position, answer=pb.JobAnswer()))
    await running.flush()
    assert dict(world.process.items) == {("succeeded",): 2}
    with pytest.raises(AssertionError, match="has an outcome already"):
        await running.log.append([outcome(1, answer=pb.JobAnswer())], at_end=False)
    assert running.log.counts.total == 3


async def test_a_flush_waits_for_the_write_that_was_stopped(world: World) -> None:
    running = world.new_attempt()
    await running.load()
    running.log.add(bad_line_outcome(0))
    writing = asyncio.ensure_future(running.log.append(running.log.take(), at_end=False))
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    assert writing.cancelled()
    running.log.add(bad_line_outcome(1))
    await running.flush()
    assert [one.position for one in await world.log()] == [0, 1]


async def test_outcomes_of_a_moment_are_written_together(
    world: World, gateway: GatewayDouble
) -> None:
    running = world.new_attempt()
    await running.load()
    async with asyncio.timeout(BOUND_S):
        await running.run(blocks([entry(position) for position in range(40)]))
    sizes = [len(one.outcomes) for one in await world.segments()]
    assert sum(sizes) == 40
    assert len(sizes) < 10


async def test_while_too_much_is_unwritten_nothing_is_sent(
    world: World, gateway: GatewayDouble
) -> None:
    running = world.new_attempt()
    await running.load()
    running.window.add([entry(UNWRITTEN_MAX)])
    for position in range(UNWRITTEN_MAX):
        running.log.add(bad_line_outcome(position))
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
    assert UNWRITTEN_MAX == 2048


async def test_so_many_items_are_in_flight_as_it_is_told(idle: World) -> None:
    running = idle.new_attempt()
    waiting = asyncio.ensure_future(running.changed.wait())
    await asyncio.sleep(0)
    running.set_concurrency(1)
    await asyncio.wait_for(waiting, BOUND_S)
    send(running, entry(0), entry(1))
    assert running.window.next_item(time.monotonic()) is None
    running.set_concurrency(2)
    assert running.window.next_item(time.monotonic()) is not None


def test_an_input_that_cannot_be_read_says_what_to_do() -> None:
    stops = input_unreadable(InvalidRequest.of("url", "was deleted"))
    assert (stops.code, stops.state) == ("INPUT_UNREADABLE", pb.JOB_STATE_PAUSED)
    assert str(stops).endswith("was deleted; then resume the job")


async def test_the_timeout_of_an_item_is_an_hour_or_what_the_job_says(idle: World) -> None:
    assert idle.new_attempt().timeout_s == 3600.0
    limits = pb.JobLimits()
    limits.item_timeout.FromMilliseconds(1500)
    assert idle.new_attempt(idle.record(limits=limits)).timeout_s == 1.5


def test_what_is_kept_of_an_answer() -> None:
    response = answered("x")
    response.answer.reasoning = "because"
    response.answer.started.request_id = "req-1"
    response.answer.started.model = "auto"
    response.answer.finished.reason = inference_pb2.FINISH_REASON_LENGTH
    response.answer.finished.rules.append("pii.email")
    response.answer.logprobs.add(logprob=-1.0)
    found = answer_of(response)
    assert found.HasField("finish_time")
    found.ClearField("finish_time")
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
    )
    response.answer.finished.model = ""
    assert answer_of(response).model == "auto"


def test_what_is_kept_of_embeddings() -> None:
    embedded = inference_pb2.EmbedResponse(request_id="req-1", model="embed")
    embedded.usage.prompt_tokens = 4
    embedded.embeddings.add(values=b"1234")
    found = answer_of(RunResponse(embedded=embedded, cost=0.25))
    assert found.HasField("finish_time")
    found.ClearField("finish_time")
    assert found == pb.JobAnswer(
        request_id="req-1",
        model="embed",
        finish_reason=inference_pb2.FINISH_REASON_STOP,
        usage=embedded.usage,
        cost=0.25,
        embeddings=embedded.embeddings,
    )
