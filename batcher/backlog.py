"""How many tasks of one model wait in JetStream for a batcher to take them.

Every message that is pulled says how many are behind it. JetStream is asked while nothing is pulled, if something was
left or if nothing can be pulled.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import nats.errors
from nats.js import JetStreamContext

from sluice.wire import subjects

log = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0
ANSWER_S: Final = 2.0


class Backlog(Mapping[str, int]):
    """Tasks by class; ``blocked`` says whether none of a class can be pulled now."""

    def __init__(self, js: JetStreamContext, model: str, blocked: Callable[[str], bool]) -> None:
        self._js = js
        self._model = model
        self._blocked = blocked
        self._counts = dict.fromkeys(subjects.CLASSES, 0)
        self._fresh: set[str] = set()

    def __getitem__(self, priority_class: str) -> int:
        return self._counts[priority_class]

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)

    def seen(self, priority_class: str, count: int) -> None:
        """A message said how many are behind it."""
        self._counts[priority_class] = count
        self._fresh.add(priority_class)

    async def run(self) -> None:
        """Asks for what nobody said, until it is cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            for name in subjects.CLASSES:
                if name not in self._fresh and (self._counts[name] or self._blocked(name)):
                    await self._ask(name)
            self._fresh.clear()

    async def _ask(self, priority_class: str) -> None:
        consumer = subjects.tasks_consumer(self._model, priority_class)
        try:
            async with asyncio.timeout(ANSWER_S):
                info = await self._js.consumer_info(subjects.TASKS_STREAM, consumer)
        except (TimeoutError, nats.errors.Error) as error:
            log.warning("the backlog of %s is not known: %s", consumer, error)
        else:
            self._counts[priority_class] = info.num_pending or 0
