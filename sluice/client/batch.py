"""Answer many prompts: build their requests, run them concurrently, and collect their outcomes."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from sluice.client.answer import Answer, whole_answer
from sluice.client.request import GenerateOptions, Prompt, generate_request
from sluice.errors import BY_REASON, InvalidRequest, SluiceError
from sluice.v1 import inference_pb2 as pb
from sluice.wire.clock import ms_of

BATCH_CONCURRENCY: Final = 64
"""Default number of concurrent requests of `generate_batch`."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class AnswerBatch:
    """The outcomes of many prompts.

    Attributes:
        outcomes: An answer or an error for each prompt, in the order of the prompts.
        wall_s: Time from the first call to the last outcome, in seconds.
        costs: Cost of each prompt; empty unless they were sent with `one_call`.
        currency: Currency of the costs.
    """

    outcomes: tuple[Answer | SluiceError, ...]
    wall_s: float
    costs: tuple[float, ...] = ()
    currency: str = ""

    @property
    def answers(self) -> tuple[Answer, ...]:
        """Answers of the prompts that did not fail, in the order of the prompts."""
        return tuple(outcome for outcome in self.outcomes if isinstance(outcome, Answer))

    @property
    def failed(self) -> int:
        """Number of prompts that failed."""
        return len(self.outcomes) - len(self.answers)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompts that have answers."""
        return sum(answer.usage.prompt_tokens for answer in self.answers)

    @property
    def completion_tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(answer.usage.completion_tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers per second of `wall_s`."""
        return self.completion_tokens / self.wall_s if self.wall_s else 0.0


def batch_requests(
    prompts: Sequence[Prompt | pb.GenerateRequest], options: GenerateOptions
) -> list[pb.GenerateRequest]:
    """Return the messages for `generate_batch`.

    Raises:
        InvalidRequest: A value does not fit its field, or there is one idempotency key for all prompts.
    """
    if options.get("idempotency_key"):
        raise InvalidRequest.of("idempotency_key", "identifies one answer; leave it out of a batch")
    chosen: GenerateOptions = {"priority": "standard", **options}
    return [_request(prompt, chosen, at) for at, prompt in enumerate(prompts)]


def one_request(requests: Sequence[pb.GenerateRequest]) -> pb.GenerateBatchRequest:
    """Return one message with all `requests`; its priority is that of the first."""
    return pb.GenerateBatchRequest(requests=requests, priority=requests[0].priority)


def answer_batch(response: pb.GenerateBatchResponse, wall_s: float) -> AnswerBatch:
    """Return the outcomes in the response to one call."""
    return AnswerBatch(
        tuple(_outcome(result) for result in response.results),
        wall_s,
        tuple(result.cost for result in response.results),
        response.currency,
    )


def _outcome(result: pb.GenerateBatchResult) -> Answer | SluiceError:
    if result.HasField("answer"):
        return whole_answer(result.answer)
    error = result.error
    kind = BY_REASON.get(error.reason, SluiceError)
    retry_after_s = ms_of(error.retry_after) / 1e3 if error.HasField("retry_after") else None
    return kind(error.message, metadata=error.metadata, retry_after_s=retry_after_s)


async def all_aio(
    ask: Callable[[int], Awaitable[_T]], count: int, concurrency: int
) -> tuple[_T, ...]:
    """Return the results of `ask(0)` to `ask(count - 1)`, run `concurrency` at a time; the first error cancels all."""
    outcomes: dict[int, _T] = {}
    waiting = iter(range(count))

    async def work() -> None:
        # The workers share the iterator, so each takes the next request when it is done with one.
        for at in waiting:
            outcomes[at] = await ask(at)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(count, concurrency)):
                group.create_task(work())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return tuple(outcomes[at] for at in range(count))


def all_blocking(ask: Callable[[int], _T], count: int, concurrency: int) -> tuple[_T, ...]:
    """Return the results as `all_aio` does, with threads.

    An error cancels what has not started. It is raised once the running ones have ended.
    """
    with ThreadPoolExecutor(max(1, min(count, concurrency))) as pool:
        try:
            return tuple(pool.map(ask, range(count)))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _request(
    prompt: Prompt | pb.GenerateRequest, options: GenerateOptions, at: int
) -> pb.GenerateRequest:
    if isinstance(prompt, pb.GenerateRequest):
        return _named(prompt)
    try:
        return generate_request(prompt, options)
    except InvalidRequest as error:
        raise InvalidRequest(f"prompts[{at}]: {error}", violations=error.violations) from error


def _named(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """Return the request with an idempotency key, which resuming needs."""
    if request.idempotency_key:
        return request
    copy = pb.GenerateRequest(idempotency_key=uuid.uuid4().hex, idempotency_key_generated=True)
    copy.MergeFrom(request)
    return copy
