"""The two parts of a worker in turns of one event loop."""

import asyncio
import time
from collections.abc import Callable
from threading import Event

import pytest

from model_workers.runners import PACE_S, LoopRunner, ThreadRunner

WAIT_S = 30.0


class Part:
    """Plays the engine and the sender."""

    def __init__(self, *, fails: bool = False) -> None:
        self.calls: list[str] = []
        self.turned_at: list[float] = []
        self.is_due = self.has_commands = False
        self.next_due: float | None = None
        self.sends = False
        self.on_turn: Callable[[], None] = lambda: None
        self._fails = fails

    def begin(self) -> None:
        self.calls.append("begin")

    def turn(self) -> bool:
        if self._fails:
            raise ValueError
        self.calls.append("turn")
        self.turned_at.append(time.monotonic())
        self.next_due = None
        self.on_turn()
        return self.sends

    def run(self) -> None:
        self.calls.append("run")
        if self._fails:
            raise ValueError

    def stop(self) -> None:
        self.calls.append("stop")

    def close(self) -> None:
        self.calls.append("close")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (nothing tells it but the turns themselves)
            await asyncio.sleep(0)


async def test_changes_of_one_pass_are_one_turn() -> None:
    runner, engine, sender = LoopRunner(asyncio.get_running_loop()), Part(), Part()
    runner.start(engine, sender, pytest.fail)
    with runner.changes_of_engine:
        runner.changes_of_engine.notify()
    runner.changes_of_sender.notify_all()
    await until(lambda: bool(sender.calls))
    await asyncio.sleep(0)
    assert (engine.calls, sender.calls) == (["begin", "turn"], ["turn"])
    engine.on_turn = runner.changes_of_sender.notify_all  # which is sent in the same turn
    runner.changes_of_engine.notify()
    await until(lambda: len(sender.calls) == 2)
    await asyncio.sleep(0)
    assert engine.calls == ["begin", "turn", "turn"]
    runner.stop(engine, sender)
    assert (engine.calls[-1], sender.calls[-2:]) == ("stop", ["turn", "close"])
    runner.changes_of_engine.notify()
    await asyncio.sleep(0)
    assert engine.calls.count("turn") == 2


async def test_what_is_due_later_has_a_turn_then() -> None:
    runner, engine, sender = LoopRunner(asyncio.get_running_loop()), Part(), Part()
    runner.start(engine, sender, pytest.fail)
    await until(lambda: bool(sender.calls))
    due_at = time.monotonic() + 0.02
    sender.on_turn = lambda: setattr(
        sender, "next_due", due_at if time.monotonic() < due_at else None
    )
    runner.changes_of_engine.notify()
    await until(lambda: len(sender.turned_at) > 1 and sender.turned_at[-1] >= due_at)
    runner.stop(engine, sender)


async def test_messages_keep_a_distance() -> None:
    runner, engine, sender = LoopRunner(asyncio.get_running_loop()), Part(), Part()
    sender.sends = True
    engine.on_turn = lambda: setattr(sender, "next_due", 0.0)
    runner.start(engine, sender, pytest.fail)
    while len(sender.turned_at) < 3:
        runner.changes_of_engine.notify()
        await asyncio.sleep(0)
    first, second, third = sender.turned_at[:3]
    assert min(second - first, third - second) >= 0.9 * PACE_S
    assert len(engine.turned_at) >= 3
    runner.stop(engine, sender)


async def test_steps_wait_to_be_sent_and_commands_do_not() -> None:
    runner = LoopRunner(asyncio.get_running_loop(), pace_s=WAIT_S)
    engine, sender = Part(), Part()
    sender.sends = True
    runner.start(engine, sender, pytest.fail)
    await until(lambda: bool(sender.calls))
    engine.is_due = True
    for has_commands, turns in ((False, 1), (True, 2)):
        engine.has_commands = has_commands
        runner.changes_of_engine.notify()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (engine.calls.count("turn"), sender.calls) == (turns, ["turn"])
    runner.stop(engine, sender)


async def test_timers_are_whole_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, delays = asyncio.get_running_loop(), list[float]()
    call_later = loop.call_later

    def record(delay: float, callback: Callable[..., object]) -> asyncio.TimerHandle:
        delays.append(delay)
        return call_later(delay, callback)

    monkeypatch.setattr(loop, "call_later", record)
    runner, engine, sender = LoopRunner(loop), Part(), Part()
    sender.on_turn = lambda: setattr(sender, "next_due", time.monotonic() + 0.0003)
    runner.start(engine, sender, pytest.fail)
    await until(lambda: bool(delays))
    assert delays[0] == 0.001
    runner.stop(engine, sender)


async def test_an_engine_that_is_due_goes_on() -> None:
    runner, engine, sender = LoopRunner(asyncio.get_running_loop()), Part(), Part()
    engine.is_due = True
    runner.start(engine, sender, pytest.fail)
    await until(lambda: engine.calls.count("turn") > 3)
    runner.stop(engine, sender)


async def test_a_fault_ends_the_turns(caplog: pytest.LogCaptureFixture) -> None:
    faults: list[str] = []
    runner, engine, sender = LoopRunner(asyncio.get_running_loop()), Part(fails=True), Part()
    runner.start(engine, sender, lambda: faults.append("fault"))
    await until(lambda: bool(faults))
    assert not sender.calls
    assert "ended by a fault" in caplog.text


def test_threads_end_and_tell_faults() -> None:
    engine, sender, told = Part(), Part(fails=True), Event()
    threads = ThreadRunner(gives_way=False)
    threads.start(engine, sender, told.set)
    assert told.wait(WAIT_S)
    threads.stop(engine, sender)
    assert (engine.calls, sender.calls) == (["run", "stop"], ["run", "stop"])
