"""A command that runs until a signal comes."""

import asyncio
import os
import signal

import pytest

from supervisor.serve import until_signal

BOUND_S = 30


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_until_signal_cancels_what_runs(sent: signal.Signals) -> None:
    running, is_cancelled = asyncio.Event(), False

    async def body() -> None:
        nonlocal is_cancelled
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            is_cancelled = True
            raise

    ends = asyncio.ensure_future(until_signal(body()))
    await running.wait()
    os.kill(os.getpid(), sent)
    await asyncio.wait_for(ends, BOUND_S)
    assert is_cancelled


async def test_until_signal_survives_hangup_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def body() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    await asyncio.wait_for(until_signal(body()), BOUND_S)
