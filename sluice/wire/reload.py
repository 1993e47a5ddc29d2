"""A running process reads its configuration again: on SIGHUP, and on a request over NATS, to which it replies.

`sluice reload` asks with `request_reload`. Every gateway and batcher hears the question; the one whose process and file
it names answers when the configuration is in force or refused. Core NATS drops messages, so a question is asked again
until it is answered. The log says the same, for people; no program reads it.
"""

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from sluice.background import BackgroundTasks
from sluice.errors import SettingsError
from sluice.internal.v1.control_pb2 import ReloadAnswer, ReloadQuestion
from sluice.settings import load
from sluice.settings.reload import Apply
from sluice.wire import subjects
from sluice.wire.codec import MalformedMessage, pack, unpack

logger = logging.getLogger(__name__)

REPEAT_S: Final = 1.0
"""After this time without an answer the question is sent again, seconds."""
_PROBLEM_MAX: Final = 16_384


@asynccontextmanager
async def reloading(path: Path, apply: Apply, client: Client) -> AsyncIterator[None]:
    """Load `path` at SIGHUP or a request to reload, and hand it to `apply`, on the running loop.

    Afterwards SIGHUP does what it did before.
    """
    loop = asyncio.get_running_loop()
    reloads = _Reloads(path, apply, client)
    before = signal.getsignal(signal.SIGHUP)
    loop.add_signal_handler(signal.SIGHUP, reloads.start, "")
    subscription = await client.subscribe(subjects.RELOAD, cb=reloads.on_question)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, before)
        with suppress(NatsError):
            await subscription.unsubscribe()
        reloads.close()


async def request_reload(
    client: Client, pid: int, path: Path, alive: Callable[[], bool], bound_s: float
) -> ReloadAnswer | None:
    """Make the process `pid` read its file `path`, absolute, again.

    Returns:
        Its reply; None if none came within `bound_s` seconds, the process is not `alive` any more, or NATS failed.
    """
    question = ReloadQuestion(id=secrets.token_hex(8), pid=pid, path=str(path))
    answered: asyncio.Future[ReloadAnswer] = asyncio.get_running_loop().create_future()

    async def take(message: Msg) -> None:
        if not answered.done():
            answered.set_result(unpack(ReloadAnswer, message.data))

    subscription = await client.subscribe(subjects.reloaded(question.id), cb=take)
    try:
        async with asyncio.timeout(bound_s):
            while alive():
                await client.publish(subjects.RELOAD, pack(question))
                done, _ = await asyncio.wait([answered], timeout=REPEAT_S)
                if done:
                    return answered.result()
    except (TimeoutError, NatsError):
        return None
    finally:
        answered.cancel()
        with suppress(NatsError):
            await subscription.unsubscribe()
    return None


class _Reloads:
    """One reload at a time, in the order in which they were asked for."""

    def __init__(self, path: Path, apply: Apply, client: Client) -> None:
        self._path = path.resolve()
        self._apply = apply
        self._client = client
        self._turn = asyncio.Lock()
        self._reloads = BackgroundTasks()
        self._questions: set[str] = set()
        """Those whose reloads wait or run."""

    async def on_question(self, message: Msg) -> None:
        try:
            question = unpack(ReloadQuestion, message.data)
        except MalformedMessage as error:
            logger.warning("ignored malformed reload request: %s", error)
            return
        if question.pid != os.getpid() or question.path != str(self._path):
            return
        if not subjects.is_token(question.id):
            logger.warning("ignored malformed reload request: its id cannot be part of a subject")
        elif question.id not in self._questions:
            self._questions.add(question.id)
            self.start(question.id)

    def start(self, question: str) -> None:
        """Reload, then reply to `question`; "" is only logged."""
        self._reloads.spawn(self._run(question))

    def close(self) -> None:
        self._reloads.cancel()

    async def _run(self, question: str) -> None:
        async with self._turn:
            problem = await self._reload()
        if not question:
            return
        self._questions.discard(question)
        answer = ReloadAnswer(taken=problem is None, problem=(problem or "")[:_PROBLEM_MAX])
        try:
            await self._client.publish(subjects.reloaded(question), pack(answer))
        except NatsError as error:
            logger.warning("publishing the outcome of a reload failed: %s", error)

    async def _reload(self) -> str | None:
        """Reload; return why the configuration stays as it was, or None if the new one is in force."""
        try:
            applying = self._apply(load(self._path))
            if applying is not None:
                await applying
        except SettingsError as error:
            logger.error("reload failed, the configuration stays in force: %s", error)
            return str(error)
        except Exception as error:  # the task would end silently, and who asked would wait
            logger.exception("reload failed, the configuration stays in force: internal error")
            return f"internal error: {type(error).__name__}; see its log"
        logger.info("reloaded configuration %s", self._path)
        return None
