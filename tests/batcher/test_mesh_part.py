"""The batcher between a real nats-server and a real Triton; the test plays the gateway."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from sluice.internal.v1 import frame_pb2, task_pb2
from sluice.startup import free_port
from sluice.wire import jetstream, subjects
from tests.batcher.batchers import ECHO, batcher_process, running_batcher, settings_of
from tests.batcher.gateway_double import ACK, NAK, TERM, GatewayDouble, echo_of
from tests.batcher.tritons import MortalTriton
from tests.support.nats import running_nats

LONG = 5_000
"""Tokens of an answer that has only begun when its first ones come."""
ENDLESS = 5_000_000
"""Tokens of an answer that nobody lets finish."""


@pytest.fixture
async def batcher(
    nats_url: str, gateway: GatewayDouble, echo_triton: MortalTriton
) -> AsyncIterator[str]:
    """A batcher that serves the echo model; gives its id."""
    async with running_batcher(settings_of(nats_url, echo_triton.address, ECHO)):
        yield await gateway.batcher_live()


def end_of(final: frame_pb2.Final | None) -> str:
    assert final is not None
    return frame_pb2.RowEnd.Name(final.end)


async def test_tasks_are_answered_in_full_and_leave_the_work_queue(
    batcher: str, gateway: GatewayDouble
) -> None:
    tasks = [
        await gateway.ask(prompt=(n, n + 1, n + 2), max_tokens=20, priority_class=name)
        for n, name in enumerate(("interactive", "standard", "bulk") * 8)
    ]
    for task in tasks:
        answer = await gateway.finished(task)
        assert answer.token_ids == echo_of(task)
        assert end_of(answer.final) == "ROW_END_LENGTH"
        assert await gateway.settled(task) == ACK
    assert await gateway.tasks_left() == 0
    assert not gateway.questions


async def test_a_final_frame_says_where_the_time_went(batcher: str, gateway: GatewayDouble) -> None:
    answer = await gateway.finished(await gateway.ask(logprobs=True))
    assert answer.final is not None
    timings = answer.final.timings
    assert all(value > 0 for value in (timings.queue_ms, timings.batch_ms, timings.prefill_ms))
    assert len(answer.logprobs) == len(answer.token_ids)


async def test_frames_lost_on_the_way_are_sent_again(batcher: str, gateway: GatewayDouble) -> None:
    lost: list[int] = []

    def lose(frame: frame_pb2.Frame) -> bool:
        if len(lost) < 3 and frame.start_index % 2 == 1 and frame.start_index not in lost:
            lost.append(frame.start_index)
            return True
        return False

    gateway.lose = lose
    task = await gateway.ask(prompt=range(50), max_tokens=200)
    assert (await gateway.finished(task)).token_ids == echo_of(task)
    assert len(lost) == 3


async def test_a_lost_final_is_repeated_until_it_is_confirmed(
    batcher: str, gateway: GatewayDouble
) -> None:
    lost: list[int] = []

    def lose(frame: frame_pb2.Frame) -> bool:
        if frame.HasField("final") and len(lost) < 2:
            lost.append(frame.start_index)
            return True
        return False

    gateway.lose = lose
    task = await gateway.ask()
    assert (await gateway.finished(task)).token_ids == echo_of(task)
    assert await gateway.settled(task) == ACK
    assert not gateway.questions


async def test_without_any_confirmation_the_gateway_is_asked_and_the_row_dropped(
    batcher: str, gateway: GatewayDouble
) -> None:
    gateway.confirms = gateway.waits = False
    task = await gateway.ask()
    assert await gateway.settled(task) == ACK
    assert gateway.questions == [task.request_id]


async def test_rows_of_a_gateway_that_has_gone_are_dropped(
    batcher: str, gateway: GatewayDouble
) -> None:
    task = gateway.task()
    task.gateway = "gone"
    await gateway.publish(task)
    assert await gateway.settled(task) == ACK


async def test_cancel_ends_a_running_row_and_frees_its_slot(
    batcher: str, gateway: GatewayDouble
) -> None:
    tasks = [await gateway.ask(max_tokens=ENDLESS) for _ in range(ECHO.slots)]
    for task in tasks:
        await gateway.has_tokens(task, 1)
    waiting = await gateway.ask()
    await gateway.cancel(*(task.request_id for task in tasks))
    for task in tasks:
        answer = await gateway.finished(task)
        assert end_of(answer.final) == "ROW_END_CANCELLED"
        assert len(answer.token_ids) < ENDLESS
        assert await gateway.settled(task) == ACK
    assert (await gateway.finished(waiting)).token_ids == echo_of(waiting)


async def test_a_task_that_is_too_late_never_reaches_a_worker(
    batcher: str, gateway: GatewayDouble
) -> None:
    answer = await gateway.finished(await gateway.ask(timeout_s=-1.0))
    assert end_of(answer.final) == "ROW_END_DEADLINE"
    assert answer.token_ids == []
    assert answer.final is not None
    assert answer.final.timings.batch_ms == 0


async def test_the_deadline_ends_a_running_row(batcher: str, gateway: GatewayDouble) -> None:
    task = await gateway.ask(prompt=range(99), max_tokens=ENDLESS, timeout_s=0.5)
    answer = await gateway.finished(task)
    assert end_of(answer.final) == "ROW_END_DEADLINE"
    assert answer.token_ids[:200] == [*range(99), *range(99), 0, 1]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\xff\xff", "not a Task"),
        (b"", "request_id"),
        (task_pb2.Task(request_id="r", gateway="no.token").SerializeToString(), "gateway"),
    ],
)
async def test_a_malformed_message_becomes_a_dead_letter(
    batcher: str, gateway: GatewayDouble, payload: bytes, reason: str
) -> None:
    await gateway.js.publish(subjects.tasks("echo", "bulk"), payload, headers={"X-Kept": "yes"})
    letter = await gateway.dead_letter()
    assert letter.data == payload
    assert letter.headers is not None
    assert letter.headers["Sluice-Reason"].startswith(reason)
    assert letter.headers["X-Kept"] == "yes"
    await gateway.until(lambda: TERM in gateway.settlements.values())


async def test_a_task_delivered_too_often_becomes_a_dead_letter(
    nats_url: str, gateway: GatewayDouble, echo_triton: MortalTriton
) -> None:
    task = await gateway.ask()
    await give_back(gateway, task, jetstream.MAX_DELIVER)
    async with running_batcher(settings_of(nats_url, echo_triton.address, ECHO)):
        answer = await gateway.finished(task)
        assert end_of(answer.final) == "ROW_END_FAILED"
        assert answer.final is not None
        assert answer.final.error.reason == "ENGINE_FAILED"
        letter = await gateway.dead_letter()
        assert letter.data == task.SerializeToString()
        await gateway.until(lambda: TERM in gateway.settlements.values())


async def test_a_task_that_every_batcher_died_of_becomes_a_dead_letter(
    nats_url: str, gateway: GatewayDouble
) -> None:
    # No worker: this batcher pulls nothing itself.
    async with running_batcher(settings_of(nats_url, f"127.0.0.1:{free_port()}", ECHO)):
        await gateway.until(lambda: bool(gateway.reports))
        await gateway.ack_wait(0.1)
        task = await gateway.ask()
        subscription = await gateway.js.pull_subscribe_bind(
            subjects.tasks_consumer("echo", "interactive"), stream=subjects.TASKS_STREAM
        )
        for _ in range(jetstream.MAX_DELIVER + 1):
            await subscription.fetch(1, timeout=5.0)
        # JetStream notices when somebody asks for more.
        with pytest.raises(TimeoutError):
            await subscription.fetch(1, timeout=0.5)
        letter = await gateway.dead_letter()
        assert letter.data == task.SerializeToString()
        assert letter.headers is not None
        assert "no batcher said" in letter.headers["Sluice-Reason"]
        assert letter.headers["Nats-Msg-Id"] == task.request_id


async def test_reports_count_what_no_batcher_has_taken(
    nats_url: str, gateway: GatewayDouble
) -> None:
    def backlogs() -> list[int]:
        return [entry.backlog for entry in gateway.reports[-1].models[0].classes]

    async with running_batcher(settings_of(nats_url, f"127.0.0.1:{free_port()}", ECHO)):
        await gateway.until(lambda: bool(gateway.reports))
        assert backlogs() == [0, 0, 0]
        for name in ("interactive", "bulk", "bulk"):
            await gateway.ask(priority_class=name)
        await gateway.until(lambda: backlogs() == [1, 0, 2])


async def test_a_dead_letter_that_is_too_large_with_its_reason_keeps_the_reason(
    batcher: str, gateway: GatewayDouble
) -> None:
    payload = b"\xff" * (gateway.client.max_payload - 10)
    await gateway.js.publish(subjects.tasks("echo", "bulk"), payload)
    letter = await gateway.dead_letter()
    assert letter.data == b""
    assert letter.headers is not None
    assert letter.headers["Sluice-Reason"].startswith("not a Task")
    task = await gateway.ask(priority_class="bulk")
    assert (await gateway.finished(task)).token_ids == echo_of(task)


async def test_a_redelivered_task_nobody_waits_for_is_dropped(
    nats_url: str, gateway: GatewayDouble, echo_triton: MortalTriton
) -> None:
    task = await gateway.ask()
    await give_back(gateway, task, 1)
    gateway.waits = False
    async with running_batcher(settings_of(nats_url, echo_triton.address, ECHO)):
        assert await gateway.settled(task) == ACK
        assert not gateway.answers[task.request_id].frames


async def test_a_redelivered_task_goes_on_behind_what_the_gateway_has(
    nats_url: str, gateway: GatewayDouble, echo_triton: MortalTriton
) -> None:
    task = await gateway.ask(prompt=range(20), max_tokens=15)
    await give_back(gateway, task, 1)
    answer = gateway.answers[task.request_id]
    answer.token_ids = echo_of(task)[:6]
    async with running_batcher(settings_of(nats_url, echo_triton.address, ECHO)):
        assert (await gateway.finished(task)).token_ids == echo_of(task)
    assert answer.frames[0].start_index == 6
    assert answer.frames[0].attempt == 1000


async def test_in_progress_acknowledgements_keep_a_task_here(
    nats_url: str,
    gateway: GatewayDouble,
    echo_triton: MortalTriton,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("batcher.jetstream.acks.ACK_PROGRESS_S", 0.1)
    async with running_batcher(settings_of(nats_url, echo_triton.address, ECHO)):
        await gateway.batcher_live()
        await gateway.ack_wait(0.5)
        task = await gateway.ask(prompt=range(99), max_tokens=ENDLESS)
        await gateway.until(lambda: gateway.progress >= 10)
        await gateway.cancel(task.request_id)
        assert await gateway.settled(task) == ACK
        assert gateway.deliveries == {gateway.sequence(task): 1}


async def test_a_task_delivered_again_to_its_holder_goes_on(
    nats_url: str,
    gateway: GatewayDouble,
    echo_triton: MortalTriton,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("batcher.jetstream.acks.ACK_PROGRESS_S", 0.8)
    async with running_batcher(settings_of(nats_url, echo_triton.address, ECHO)):
        await gateway.batcher_live()
        await gateway.ack_wait(0.3)
        task = await gateway.ask(prompt=range(99), max_tokens=ENDLESS)
        await gateway.until(lambda: gateway.deliveries.get(gateway.sequence(task), 0) >= 2)
        await gateway.cancel(task.request_id)
        assert await gateway.settled(task) == ACK
        assert gateway.answers[task.request_id].attempt == 0
        assert await gateway.tasks_left() == 0


async def test_another_batcher_continues_the_rows_of_a_killed_one(
    nats_url: str, gateway: GatewayDouble, echo_triton: MortalTriton, tmp_path: Path
) -> None:
    settings = settings_of(nats_url, echo_triton.address, ECHO)
    with batcher_process(settings, tmp_path / "first") as first:
        await gateway.batcher_live()
        tasks = [await gateway.ask(prompt=range(n, 99), max_tokens=LONG) for n in (1, 2)]
        for task in tasks:
            await gateway.has_tokens(task, 1)
        first.kill()
        async with running_batcher(settings):
            await gateway.another_batcher_live()
            await gateway.ack_wait(0.5)
            await gateway.until(lambda: len(set(gateway.questions)) == 2)
            await gateway.ack_wait(jetstream.ACK_WAIT_S)
            for task in tasks:
                answer = await gateway.finished(task)
                assert answer.token_ids == echo_of(task)
                assert answer.attempt >= 1000


async def test_a_batcher_that_ends_gives_its_rows_to_another_at_once(
    nats_url: str, gateway: GatewayDouble, echo_triton: MortalTriton, tmp_path: Path
) -> None:
    settings = settings_of(nats_url, echo_triton.address, ECHO)
    with batcher_process(settings, tmp_path / "first") as first:
        await gateway.batcher_live()
        tasks = [await gateway.ask(prompt=range(n, 99), max_tokens=LONG) for n in range(1, 12)]
        await gateway.has_tokens(tasks[0], 1)
        first.terminate()
        await gateway.until(lambda: gateway.reports[-1].leaving)
        await gateway.until(lambda: NAK in gateway.settlements.values())
        async with running_batcher(settings):
            for task in tasks:
                assert (await gateway.finished(task, 30.0)).token_ids == echo_of(task)
        assert first.wait(10.0) == 0


async def test_a_deleted_consumer_is_made_again(batcher: str, gateway: GatewayDouble) -> None:
    name = subjects.tasks_consumer("echo", "interactive")
    await gateway.js.delete_consumer(subjects.TASKS_STREAM, name)
    task = await gateway.ask()
    assert (await gateway.finished(task)).token_ids == echo_of(task)


async def test_a_pull_without_a_sign_of_life_is_asked_again(
    nats_url: str,
    gateway: GatewayDouble,
    echo_triton: MortalTriton,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("batcher.jetstream.consumer.SILENCE_MAX_S", 0.1)
    monkeypatch.setattr("batcher.jetstream.consumer.RETRY_S", 0.05)
    pulls: list[str] = []

    async def seen(message: Msg) -> None:
        pulls.append(message.subject)

    await gateway.client.subscribe("$JS.API.CONSUMER.MSG.NEXT.>", cb=seen)
    async with running_batcher(settings_of(nats_url, echo_triton.address, ECHO)):
        task = await gateway.ask()
        assert (await gateway.finished(task)).token_ids == echo_of(task)
        await gateway.until(lambda: len(pulls) >= 9)


async def test_a_restart_of_nats_loses_nothing(echo_triton: MortalTriton, tmp_path: Path) -> None:
    async with AsyncExitStack() as ends:
        async with running_nats(tmp_path) as url:
            gateway = await ends.enter_async_context(GatewayDouble.connected(url))
            settings = settings_of(url, echo_triton.address, ECHO)
            await ends.enter_async_context(running_batcher(settings))
            task = await gateway.ask(prompt=range(99), max_tokens=LONG)
            await gateway.has_tokens(task, 1)
        async with running_nats(tmp_path, int(url.rsplit(":", 1)[1])):
            answer = gateway.answers[task.request_id]
            await gateway.reconnected()
            await gateway.resend(task.request_id, len(answer.token_ids))
            assert (await gateway.finished(task)).token_ids == echo_of(task)
            assert await gateway.settled(task) == ACK
            following = await gateway.ask()
            assert (await gateway.finished(following)).token_ids == echo_of(following)
            await ends.aclose()


async def test_a_batcher_ends_even_while_nats_is_away(
    echo_triton: MortalTriton, tmp_path: Path
) -> None:
    async with AsyncExitStack() as ends:
        async with running_nats(tmp_path) as url:
            gateway = await ends.enter_async_context(GatewayDouble.connected(url))
            settings = settings_of(url, echo_triton.address, ECHO)
            process = ends.enter_context(batcher_process(settings, tmp_path))
            await gateway.batcher_live()
            task = await gateway.ask(prompt=range(99), max_tokens=LONG)
            await gateway.has_tokens(task, 1)
        process.terminate()
        assert await asyncio.to_thread(process.wait, 10.0) == 0


async def give_back(gateway: GatewayDouble, task: task_pb2.Task, times: int) -> None:
    """Takes a task and gives it back, as batchers that died would have."""
    config = jetstream.tasks_consumer(task.model, task.priority_class, 100)
    await gateway.js.add_consumer(subjects.TASKS_STREAM, config)
    subscription = await gateway.js.pull_subscribe_bind(
        config.durable_name, stream=subjects.TASKS_STREAM
    )
    for _ in range(times):
        (message,) = await subscription.fetch(1, timeout=5.0)
        await message.nak()
        await gateway.settled(task)
    await subscription.unsubscribe()
    gateway.settlements.clear()
