"""The loop of one model. Events only change the ledger and wake it; it alone carries out what the ledger wants, so
that frames keep their order:

    wake -> advance the ledger -> carry out its effects -> let the intake pull as far as there is room -> sleep
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from batcher.core.effects import Effects, Formed
from batcher.core.ledger import Ledger
from batcher.core.rows import Row
from batcher.held import ask_held
from batcher.packing import wire_batch
from batcher.process import Process
from batcher.settlement import HeldMessages
from batcher.workers.fleet import Fleet

log = logging.getLogger(__name__)

CLOSE_S: Final = 3.0
"""How long questions and dead letters may still take when the batcher ends."""


class Pump:
    """Moves one model's ledger on.

    Args:
        after: called when effects were carried out: there may be more room.
    """

    def __init__(
        self,
        process: Process,
        model: str,
        ledger: Ledger,
        fleet: Fleet,
        messages: HeldMessages,
        after: Callable[[], None],
    ) -> None:
        self._process = process
        self._model = model
        self._ledger = ledger
        self._fleet = fleet
        self._messages = messages
        self._after = after
        self._woken = asyncio.Event()
        self._idle = asyncio.Event()
        self._chores: set[asyncio.Task[None]] = set()

    def wake(self) -> None:
        """Something happened."""
        self._woken.set()

    async def run(self) -> None:
        """Turns until it is cancelled."""
        while True:
            self._woken.clear()
            now = time.monotonic()
            share = self._process.peers.share(self._model, now)
            self._ledger.advance(now, self._fleet.capacities(self._ledger, share))
            await self._carry_out(self._ledger.take())
            self._after()
            if not len(self._ledger) and not self._woken.is_set():
                self._idle.set()
            await self._sleep()

    async def drain(self, drain_s: float) -> None:
        """Gives back what waits, lets the rest end for at most ``drain_s`` seconds, and gives back what is left.

        `run` must go on until this returns.
        """
        self._ledger.drain(time.monotonic())
        try:
            async with asyncio.timeout(drain_s):
                await self._until_idle()
        except TimeoutError:
            log.warning("%d rows of %s are given back", len(self._ledger), self._model)
            self._ledger.release(time.monotonic())
            await self._until_idle()

    async def close(self) -> None:
        """Waits, but not for ever, for what is still asked or buried."""
        if self._chores:
            await asyncio.wait(self._chores, timeout=CLOSE_S)

    async def _sleep(self) -> None:
        wake_at = self._ledger.wake_at()
        left_s = None if wake_at is None else max(0.0, wake_at - time.monotonic())
        try:
            async with asyncio.timeout(left_s):
                await self._woken.wait()
        except TimeoutError:
            return

    async def _until_idle(self) -> None:
        self._idle.clear()
        self._woken.set()
        await self._idle.wait()

    async def _carry_out(self, effects: Effects) -> None:
        for move in effects.moves:
            self._process.spans.moved(move)
        for formed in effects.batches:
            self._send(formed)
        await self._process.delivery.send(effects.frames)
        if effects.cancels:
            self._spawn(self._fleet.cancel(effects.cancels))
        for row in effects.dead:
            assert row.final is not None
            self._spawn(self._messages.bury(row.id, row.final.error.message))
        for row in effects.questions:
            self._spawn(self._ask(row))
        for request_id, how in effects.settled:
            await self._messages.settle(request_id, how)

    def _send(self, formed: Formed) -> None:
        own, *rows = self._process.spans.formed(formed)
        batch = wire_batch(formed, self._process.batcher, rows, time.monotonic())
        self._fleet.send(formed.batch.worker, batch, own)

    async def _ask(self, row: Row) -> None:
        answer = await ask_held(self._process.nats_client, row.task.gateway, row.id)
        self._ledger.held(row.id, answer, time.monotonic())
        self._woken.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)
