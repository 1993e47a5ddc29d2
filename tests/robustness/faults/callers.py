"""Callers in a closed loop: each asks a question, reads the answer to its end, and asks the next one.

Two kinds: of the SDK, which resumes a broken stream, and of plain gRPC stubs, which do not and spread their calls over
all gateways. Both have a deadline of ``limit_s``, and what is not over `HANG_MARGIN_S` after it hangs.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final

import grpc
from google.rpc import error_details_pb2, status_pb2

from model_workers.tiers.tasks import heldout
from sluice.client import AsyncClient, Delta, Finished, GenerateOptions, Started
from sluice.client.request import generate_request
from sluice.errors import SluiceError
from sluice.v1 import inference_pb2 as pb
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from sluice.wire.tokens import tokens_of
from tests.robustness.faults.results import HUNG, Call, Expected, Tally

if TYPE_CHECKING:
    from sluice.v1.inference_pb2_grpc import InferenceServiceAsyncStub

TEMPERATURE: Final = 0.8
QUESTIONS: Final = 42
LONG_TOKENS: Final = 160
"""Every second answer goes on for so long, so that faults meet answers in their midst."""
HANG_MARGIN_S: Final = 5.0
RETRY_S: Final = 0.1
"""After this long a caller whose call failed asks its next question, unless the error says when."""
CALM_AT_ONCE: Final = 4
_STATUS_KEY: Final = "grpc-status-details-bin"


@dataclass(frozen=True)
class Question:
    """A prompt and how its answer is drawn."""

    prompt: str
    options: GenerateOptions


def questions(model: str, tokens_max: int = LONG_TOKENS) -> list[Question]:
    """Held-out examples of every kind, each with a seed of its own; no answer is longer than ``tokens_max``."""
    examples = heldout(n_per_cell=-(-QUESTIONS // 7), seed=11)[:QUESTIONS]
    made = []
    for number, example in enumerate(examples):
        options: GenerateOptions = {
            "model": model,
            "seed": number,
            "temperature": TEMPERATURE,
            "max_tokens": tokens_max if number % 2 else min(tokens_max, example.max_tokens),
            "min_tokens": tokens_max if number % 2 else 0,
        }
        made.append(Question(example.prompt, options))
    return made


class Caller(ABC):
    """One client of the mesh."""

    def __init__(self, addresses: Sequence[str], limit_s: float) -> None:
        self.addresses = addresses
        self.limit_s = limit_s
        self.retry_after_s: float | None = None

    async def ask(self, number: int, question: Question, tally: Tally) -> Call:
        """One call; it always returns."""
        call = Call(number, time.monotonic())
        self.retry_after_s = None
        try:
            async with asyncio.timeout(self.limit_s + HANG_MARGIN_S):
                await self._read(call, question, tally)
        except TimeoutError:
            call.failure = HUNG
        call.event(time.monotonic())
        return call

    @abstractmethod
    async def _read(self, call: Call, question: Question, tally: Tally) -> None:
        """Reads to the end, and sets ``failure`` and ``retry_after_s`` for an error."""

    @abstractmethod
    async def close(self) -> None:
        """Closes the connection."""


class SdkCaller(Caller):
    """Uses `AsyncClient`."""

    def __init__(self, addresses: Sequence[str], limit_s: float) -> None:
        super().__init__(addresses, limit_s)
        self._client = AsyncClient(",".join(addresses))

    async def _read(self, call: Call, question: Question, tally: Tally) -> None:
        try:
            options: GenerateOptions = {**question.options, "timeout_s": self.limit_s}
            async with self._client.generate(question.prompt, **options) as stream:
                async for event in stream:
                    note(call, event, tally)
        except SluiceError as error:
            call.failure = f"{error.code.name}/{error.reason}"
            self.retry_after_s = error.retry_after_s
            call.request_id = call.request_id or error.metadata.get("request_id", "")

    async def close(self) -> None:
        await self._client.close()


def note(call: Call, event: Any, tally: Tally) -> None:
    """An event of the SDK."""
    now = time.monotonic()
    call.event(now)
    if isinstance(event, Started):
        call.request_id = event.request_id
    elif isinstance(event, Delta):
        call.delta(event.index, event.token_ids, event.text)
        tally.tokens(len(event.token_ids), now)
    elif isinstance(event, Finished):
        call.finished = True


class PlainCaller(Caller):
    """Uses the generated stub and nothing else, as a client in another language would."""

    def __init__(self, addresses: Sequence[str], limit_s: float) -> None:
        super().__init__(addresses, limit_s)
        options = [
            ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        self._channel = grpc.aio.insecure_channel(f"ipv4:{','.join(addresses)}", options)
        self._stub: InferenceServiceAsyncStub = InferenceServiceStub(self._channel)

    def open(self, question: Question) -> Any:
        """The stream of an answer; cancel it when it is not read to its end."""
        request = generate_request(question.prompt, question.options)
        return self._stub.Generate(request, timeout=self.limit_s)

    async def _read(self, call: Call, question: Question, tally: Tally) -> None:
        stream = self.open(question)
        try:
            async for response in stream:
                self._note(call, response, tally)
        except grpc.aio.AioRpcError as error:
            call.failure, self.retry_after_s = described(error)
        finally:
            stream.cancel()

    def _note(self, call: Call, response: pb.GenerateResponse, tally: Tally) -> None:
        now = time.monotonic()
        call.event(now)
        if response.HasField("started"):
            call.request_id = response.started.request_id
        if response.HasField("delta"):
            token_ids = tokens_of(response.delta, response.delta.index)
            call.delta(response.delta.index, token_ids, response.delta.text)
            tally.tokens(len(token_ids), now)
        call.finished |= response.HasField("finished")

    async def close(self) -> None:
        await self._channel.close()


def described(error: grpc.aio.AioRpcError) -> tuple[str, float | None]:
    """``CODE/REASON`` of an error, and when to retry; a status of gRPC's own is ``CODE/transport``."""
    reason, retry_s = "transport", None
    for key, value in error.trailing_metadata() or ():
        if key != _STATUS_KEY:
            continue
        for detail in status_pb2.Status.FromString(value).details:
            info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                reason = info.reason
            elif detail.Unpack(retry):
                retry_s = retry.retry_delay.ToNanoseconds() / 1e9
    return f"{error.code().name}/{reason}", retry_s


KINDS: Final[dict[str, type[Caller]]] = {"sdk": SdkCaller, "plain": PlainCaller}


async def calm_answers(addresses: Sequence[str], asked: Sequence[Question]) -> list[Expected]:
    """The answers of a mesh that nothing disturbs.

    Raises:
        RuntimeError: it does not answer.
    """
    at_once, caller = asyncio.Semaphore(CALM_AT_ONCE), SdkCaller(addresses[:1], 60.0)

    async def answer(number: int, question: Question) -> Expected:
        async with at_once:
            call = await caller.ask(number, question, Tally(time.monotonic()))
        if not call.finished:
            raise RuntimeError(f"the calm mesh does not answer: {call.failure}")
        return Expected(tuple(call.token_ids), call.text)

    try:
        return await asyncio.gather(*(answer(n, question) for n, question in enumerate(asked)))
    finally:
        await caller.close()


class Load:
    """All callers of a run; those that still ask when the block ends finish their last call."""

    def __init__(
        self,
        kind: str,
        addresses: Sequence[str],
        callers: int,
        limit_s: float,
        asked: Sequence[Question],
        expected: Sequence[Expected],
    ) -> None:
        self.tally = Tally(time.monotonic())
        self._make = partial(KINDS[kind], addresses, limit_s)
        self._count = callers
        self._asked, self._expected = asked, expected
        self._ending = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Load":
        for number in range(self._count):
            caller = self._make()
            self._stack.push_async_callback(caller.close)
            self._tasks.append(asyncio.create_task(self._loop(caller, Random(number))))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ending.set()
        try:
            await asyncio.gather(*self._tasks)
        finally:
            await self._stack.aclose()

    async def _loop(self, caller: Caller, chance: Random) -> None:
        while not self._ending.is_set():
            number = chance.randrange(len(self._asked))
            call = await caller.ask(number, self._asked[number], self.tally)
            self.tally.add(call, self._expected[number])
            if call.failure is not None:
                await self._pause(caller.retry_after_s or RETRY_S)

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._ending.wait(), seconds)
        except TimeoutError:
            return
