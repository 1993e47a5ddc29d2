"""The other gateways of the mesh: who they are, and questions to them over core NATS.

Every gateway publishes a hello once a second; one that was silent for `FORGET_S` is not asked. An id belongs to one
process: a gateway that starts asks whether somebody has its id.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from google.protobuf.message import Message
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from sluice.background import BackgroundTasks
from sluice.errors import SetupError, SluiceError
from sluice.internal.v1.gateway_pb2 import (
    GatewayAnswer,
    GatewayHello,
    GatewayQuestion,
    WhoQuestion,
)
from sluice.wire import subjects
from sluice.wire.codec import MalformedMessage, OversizedMessage, pack, unpack
from sluice.wire.subjects import is_token

M = TypeVar("M", bound=Message)

HELLO_S: Final = 1.0
FORGET_S: Final = 3.5
ASK_S: Final = 0.5
"""How long a gateway may take to answer a question, seconds."""
ASK_TRIES: Final = 2
"""Unanswered questions after which a gateway counts as gone."""

_log = logging.getLogger(__name__)

Answer = Callable[[Any], Awaitable[GatewayAnswer]]
"""What a gateway answers to the message that asks."""


class HelloPart(Protocol):
    """What says something with each hello."""

    def tell(self, hello: GatewayHello) -> None:
        """Adds to the next hello."""

    def hear(self, hello: GatewayHello) -> None:
        """Another gateway says it."""


class Peers:
    """The gateways beside this one.

    Attributes:
        gateway_id: of this gateway.
        instance: names this process.
    """

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.instance = secrets.token_hex(8)
        self._questions: Mapping[str, Answer] = {}
        self._parts: Sequence[HelloPart] = ()
        self._known: dict[str, tuple[float, GatewayHello]] = {}
        """When each was heard last, and what it said, by id."""
        self._client: Client | None = None
        self._answering = BackgroundTasks()
        self._refresh_keys: Callable[[], Awaitable[None]] = _nothing

    @property
    def hellos(self) -> dict[str, GatewayHello]:
        """What those that were heard lately said last, by id."""
        now = time.monotonic()
        self._known = {name: one for name, one in self._known.items() if now - one[0] <= FORGET_S}
        return {name: hello for name, (_, hello) in sorted(self._known.items())}

    @property
    def known(self) -> list[str]:
        """Ids of those that were heard lately."""
        return list(self.hellos)

    async def start(
        self,
        client: Client,
        questions: Mapping[str, Answer],
        parts: Sequence[HelloPart],
        refresh_keys: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Takes the id and subscribes; ``questions``: what it answers, by the field of `GatewayQuestion` that asks.

        ``refresh_keys``: reads the API keys, for `sluice.wire.key_changes`.

        Raises:
            SetupError: another gateway has the id.
        """
        self._client, self._questions, self._parts = client, questions, parts
        self._refresh_keys = refresh_keys or _nothing
        who = GatewayQuestion(who=WhoQuestion())
        if await self.ask(self.gateway_id, who, tries=1) is not None:
            raise SetupError(
                f"--id: a gateway {self.gateway_id!r} is running; give this one another id, or none"
            )
        await client.subscribe(subjects.gateway(self.gateway_id), cb=self._on_question)
        await client.subscribe(subjects.GATEWAYS, cb=self._on_hello)
        await self.hello()

    async def run(self) -> None:
        """Says hello until it is cancelled."""
        while True:
            await asyncio.sleep(HELLO_S)
            await self.hello()

    async def hello(self, *, leaving: bool = False) -> None:
        """Tells the others about this gateway now."""
        hello = GatewayHello(gateway=self.gateway_id, instance=self.instance, leaving=leaving)
        for part in self._parts:
            part.tell(hello)
        try:
            await self._publish(subjects.GATEWAYS, hello)
        except OversizedMessage:
            for field in (
                "minutes",
                "reserved",
                "days",
            ):  # of very many tenants: they are in buckets
                hello.ClearField(field)
            await self._publish(subjects.GATEWAYS, hello)

    async def ask(
        self,
        gateway: str,
        question: GatewayQuestion,
        timeout_s: float = ASK_S,
        tries: int = ASK_TRIES,
    ) -> GatewayAnswer | None:
        """The answer of ``gateway``, or None when it is gone: nobody has its subject, or it does not answer."""
        assert self._client is not None, "started"
        for _ in range(tries):
            try:
                reply = await self._client.request(
                    subjects.gateway(gateway), pack(question), timeout=timeout_s
                )
                return unpack(GatewayAnswer, reply.data)
            except NoRespondersError:
                break
            except (TimeoutError, NatsError, MalformedMessage) as error:
                _log.warning("gateway %s does not answer: %s", gateway, type(error).__name__)
        return None

    async def ask_all(
        self, question: GatewayQuestion, timeout_s: float = ASK_S
    ) -> tuple[list[GatewayAnswer], list[str]]:
        """The answers of all gateways, this one's first, and who of those that were heard lately gave none.

        One of an earlier release does not know the question. Raises what this gateway's own answer raises.
        """
        known = self.known
        own = await self._answer(question)
        asked = await asyncio.gather(*(self.ask(name, question, timeout_s, 1) for name in known))
        given = {
            name: one
            for name, one in zip(known, asked, strict=True)
            if one is not None and not one.problem
        }
        return [own, *given.values()], [name for name in known if name not in given]

    async def close(self) -> None:
        """Tells the others that this gateway leaves."""
        if self._client is not None:
            await self.hello(leaving=True)

    async def _publish(self, subject: str, message: Message) -> None:
        assert self._client is not None, "started"
        try:
            await self._client.publish(subject, pack(message))
        except NatsError as error:
            _log.debug("NATS: %s not sent: %s", type(message).__name__, error)

    async def _on_hello(self, message: Msg) -> None:
        hello = _unpacked(GatewayHello, message)
        if hello is not None and hello.refreshes_keys:
            self._answering.spawn(self._reply_keys(message.reply))
            return
        if hello is None or hello.gateway == self.gateway_id or not is_token(hello.gateway):
            return
        if hello.leaving:
            self._known.pop(hello.gateway, None)
        else:
            self._known[hello.gateway] = time.monotonic(), hello
            for part in self._parts:
                part.hear(hello)

    async def _on_question(self, message: Msg) -> None:
        question = _unpacked(GatewayQuestion, message)
        if question is None:
            return
        # A task: some answers take seconds, and others must not wait for them.
        self._answering.spawn(self._reply(question, message.reply))

    async def _reply_keys(self, reply: str) -> None:
        """Answer once the API keys are read again; whoever asked sees who does not."""
        try:
            await self._refresh_keys()
        except SluiceError as error:
            _log.warning("reading changed API keys failed: %s", error)
            return
        hello = GatewayHello(gateway=self.gateway_id, instance=self.instance, peers=self.known)
        await self._publish(reply, hello)

    async def _answer(self, question: GatewayQuestion) -> GatewayAnswer:
        kind = question.WhichOneof("question") or ""
        if kind == "who":
            return GatewayAnswer()
        answer = self._questions.get(kind)
        if answer is None:
            return GatewayAnswer(problem="this release does not know the question")
        return await answer(getattr(question, kind))

    async def _reply(self, question: GatewayQuestion, reply: str) -> None:
        try:
            response = await self._answer(question)
        except SluiceError as error:
            response = GatewayAnswer(problem=error.message)
        except Exception:  # its task would end silently, and the other gateway would wait
            _log.exception("a question of another gateway failed")
            response = GatewayAnswer(problem="it failed; its log has the reason")
        await self._publish(reply, response)


async def _nothing() -> None:
    pass


def _unpacked(kind: type[M], message: Msg) -> M | None:
    try:
        return unpack(kind, message.data)
    except MalformedMessage as error:
        _log.error("NATS: %s dropped: %s", kind.__name__, error)
        return None
