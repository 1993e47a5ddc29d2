"""What the gateway knows of one request, from its first byte to the last.

`Call` carries it: one RPC, one HTTP request, or one item of a job or batch. The transports implement it:
`gateway.api.methods.GrpcCall`, `gateway.http.call.HttpCall`, and `ItemCall` for one request among many in a call.

`RequestContext` is made when the message has been read and validated. `gateway.admission.admission` fills in what it
decides, and every later step takes the context. An answer's messages come from `gateway.streaming`.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import grpc
from typing_extensions import override

from gateway.admission.overload import SchedulingParams
from gateway.admission.policies import Policies
from gateway.admission.tenant_limits import Settle
from gateway.identity.caller import Caller
from gateway.identity.resume_token import ResumeKey, ResumeToken
from gateway.models.catalog import ServedModel
from gateway.routing.router import CHARS_PER_TOKEN, Plan
from gateway.safety.findings import Placeholders
from gateway.safety.output.filter import OutputFilter
from gateway.safety.policy import SafetyPolicy
from gateway.telemetry.request_log import CALLER_GONE, RequestLog
from gateway.validation.conversation import Conversation
from gateway.validation.requests import ValidRequest
from sluice.errors import Cancelled, DeadlinePassed, InternalError, SluiceError
from sluice.internal.v1.task_pb2 import Audio, Sampling, Values
from sluice.v1.inference_pb2 import Route, Started

logger = logging.getLogger(__name__)

_ROUNDING: Final = 0.98
"""Share of a timeout after which a caller that goes is late: gRPC rounds deadlines by 1 %."""
_PASSED_ON: Final = (grpc.aio.AbortError, grpc.aio.UsageError)
"""How grpc itself ends a call: it must see them."""
_T = TypeVar("_T")


class Call(ABC):
    """One call of one transport.

    Attributes:
        caller: Who calls; set when it has been authenticated.
        metadata: Headers of the call; the trace context is among them.
        route: The path of an HTTP call; empty for others.
    """

    caller: Caller
    metadata: Mapping[str, str]
    route: str = ""

    @property
    @abstractmethod
    def remaining_s(self) -> float | None:
        """Time until the deadline of the call, in seconds; None without a deadline."""

    @property
    def certificate_names(self) -> Sequence[str]:
        """Subject alternative names of the client's verified certificate."""
        return ()

    @abstractmethod
    async def fail(self, error: SluiceError) -> None:
        """End the call with `error`."""


@dataclass
class ItemCall(Call):
    """One request of a call that carries many.

    Attributes:
        timeout_s: Time that is left for it, in seconds; None without a deadline.
        error: What it ended with.
    """

    caller: Caller
    metadata: Mapping[str, str]
    timeout_s: float | None
    error: SluiceError | None = None

    @property
    @override
    def remaining_s(self) -> float | None:
        return self.timeout_s

    @override
    async def fail(self, error: SluiceError) -> None:
        self.error = error


async def fail_with(
    work: Awaitable[_T], fail: Callable[[SluiceError], Awaitable[None]], name: object
) -> _T | None:
    """Return the result of `work`; if it raises an error, pass that to `fail` and return None.

    Args:
        work: What is awaited.
        fail: Sends the error to whoever waits. An exception of our own code is logged and becomes `InternalError`.
        name: Its text names the work in the log.
    """
    try:
        return await work
    except SluiceError as raised:
        # Without its frames, which hold the request: a client that does not read would keep it in memory.
        error = raised.with_traceback(None)
    except _PASSED_ON:
        raise
    except Exception:  # the text of an exception is not for the caller
        logger.exception("call failed: %s", name)
        error = internal_error()
    try:
        await fail(error)
    except _PASSED_ON:
        raise
    except Exception:
        logger.exception("sending %s to a caller failed: %s", error.reason, name)
        await fail(internal_error())
    return None


def internal_error() -> InternalError:
    """Return the error of a call that met a fault of the gateway."""
    return InternalError("the gateway failed; its log has the reason")


OpenFilter = Callable[[], OutputFilter | None]
"""Make a filter for an answer; None if answers are not filtered."""


@dataclass
class PreparedPrompt:
    """A prompt for one model.

    Attributes:
        model: The model.
        prompt_token_ids: Tokens of the prompt; with audio, what its decoder begins with.
        sampling: Sampling parameters.
        inspect: Makes the filter of its answer, if anybody reads that.
        values: The numbers that are wanted instead of an answer.
        truncated: Whether the text was cut to fit the context.
        audio: What the model hears.
        answer_token_ids: Tokens of an answer that is scored.
        chunks: The prompts whose answers together are the answer; the tokens are those of all. Empty for one prompt.
    """

    model: ServedModel
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    inspect: OpenFilter | None
    values: Values | None = None
    truncated: bool = False
    audio: Audio | None = None
    answer_token_ids: Sequence[int] = ()
    chunks: tuple["PreparedPrompt", ...] = ()


TextsToPrompts = Callable[[Conversation, ServedModel], Sequence[PreparedPrompt]]
"""Returns the prompts of a request about texts, of the texts as the model may see them."""


@dataclass(frozen=True)
class RequestKind:
    """What differs between the methods that call models.

    Attributes:
        span: The name of a call's span.
        operation: How telemetry and records name the method; empty if the request says it (a prompt or a chat).
        late: The message of the error when the deadline has passed.
    """

    span: str
    operation: str
    late: str


class RequestContext(SchedulingParams):
    """A valid request, how long it may take, and all that is decided about it.

    What the expected time of its answer depends on stands in `SchedulingParams`.

    Attributes:
        kind: The method that was called.
        request: The request as it was sent.
        log: What happens to it.
        request_id: Its id.
        answer_id: The id of the request whose answer it reads: an earlier one, where an idempotency key names that.
        key: Its idempotency key; empty without one.
        fingerprint: Equal for equal requests.
        with_logprobs: Whether the caller wants log-probabilities.
        timings: Returns the timings of its answer.
        conversation: Its texts as a model may see them.
        to_prompts: Makes the prompts of a request about texts; None for a request that one answer is for.
        policies: What decides about it; taken once, when it is admitted.
        safety: The safety policy that decides about it.
        governed: Model that must answer by that policy, and the rule that asked for it, if there is one.
        placeholders: Those of its texts; None if nothing was found in them.
        plan: Where it is routed.
        prompts: Until its run is made, the prompt for the first model, and that for the second of a cascade; or one for
            each text, pair or answer of a request about texts, in order.
        seed: The seed of its answer.
        task_names: What tasks call the models that it was prepared for.
        is_limited: Whether its tenant or key may have limits.
        settles: Settles what it has taken of limits, see `Admission.release`.
    """

    policies: Policies
    safety: SafetyPolicy
    governed: tuple[str, str] | None
    placeholders: Placeholders | None
    plan: Plan
    prompts: Sequence[PreparedPrompt]
    seed: int
    is_limited: bool

    def __init__(
        self,
        kind: RequestKind,
        request: ValidRequest,
        log: RequestLog,
        resume_key: ResumeKey | None = None,
        to_prompts: TextsToPrompts | None = None,
    ) -> None:
        """Begin with a valid request; `resume_key` signs the tokens that callers resume its answer with."""
        conversation, sampling = request.conversation, request.sampling
        chars = sum(map(len, conversation.texts))
        super().__init__(
            request.priority_class,
            log.arrived_at + request.timeout_s,
            tenant=request.tenant,
            allow_degraded=request.allow_degraded,
            workload=request.workload,
            prompt_tokens=chars // CHARS_PER_TOKEN
            + (conversation.sent_tokens if conversation.vocabulary else 0),
            min_tokens=sampling.min_tokens,
            max_tokens=sampling.max_tokens,
            arrived_at=log.arrived_at,
        )
        self.kind = kind
        self.request = request
        self.log = log
        self.request_id = self.answer_id = log.request_id
        self.key = request.key
        self.fingerprint = request.fingerprint
        self.with_logprobs = sampling.HasField("logprobs")
        self.timings = log.timings
        self.conversation = conversation
        self.to_prompts = to_prompts
        self.task_names = dict[str, str]()
        self.settles: list[Settle] = []
        self._resume_key = resume_key
        self._timeout: asyncio.Timeout | None = None
        self._stopped_by: SluiceError | None = None

    def started(self) -> Started:
        """Return the first event of its answer, without the length of the prompt: `AnswerStream` adds that."""
        plan = self.plan
        return Started(
            request_id=self.log.request_id,
            trace_id=self.log.trace_id,
            model=plan.model,
            route=Route(
                tier=plan.candidates[0].tier,
                strategy=plan.strategy,
                reason=plan.reason,
                degraded=plan.degraded,
            ),
            seed=self.seed,
        )

    def resume_token(self, model: str) -> ResumeToken:
        """Return the resume token of an answer of `model`; another version of the model does not continue it."""
        assert self._resume_key is not None, "it has an answer"
        seed = self.seed if self.request.sampling.temperature > 0 else 0
        return self._resume_key.token(self.fingerprint, self.task_names.get(model, model), seed)

    @property
    def open_filter(self) -> OpenFilter:
        """The function that makes the filter of its answer; it refers to nothing else of the request."""
        prompt = self.conversation
        return partial(
            self.policies.inspector.answer,
            self.safety,
            self.placeholders,
            prompt.texts,
            prompt.system_text,
        )

    # Time.

    async def run(self, work: Awaitable[_T]) -> _T:
        """Return the result of `work`, which has until the deadline.

        Raises:
            SluiceError: What `work` raised, `stop` was called with, or DeadlinePassed; with the id of the request.
        """
        try:
            async with asyncio.timeout(self.request.timeout_s) as self._timeout:
                return await work
        except TimeoutError:
            error = self._stopped_by or DeadlinePassed(self.kind.late)
            raise error.of_request(self.answer_id) from None
        except asyncio.CancelledError:
            self.departure()
            raise
        except SluiceError as error:
            # With its message only if that is none of the caller's text.
            if error.code is grpc.StatusCode.INTERNAL:
                logger.warning("%s of tenant %s: %s", error.reason, self.tenant, error.message)
            else:
                logger.debug("%s of tenant %s", error.reason, self.tenant)
            raise error.of_request(self.answer_id) from error

    def stop(self, error: SluiceError) -> None:
        """End `run` with `error`, whatever it waits for: a client that does not read blocks it."""
        self._stopped_by = error
        timeout = self._timeout
        # Without a time it is `uninterrupted`, which ends it afterwards.
        if timeout is not None and timeout.when() is not None and not timeout.expired():
            timeout.reschedule(asyncio.get_running_loop().time())

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Let neither the deadline nor `stop` end the block; they take effect behind it."""
        timeout = self._timeout
        assert timeout is not None, "it runs"
        due_at = timeout.when()
        timeout.reschedule(None)
        try:
            yield
        finally:
            now = asyncio.get_running_loop().time()
            timeout.reschedule(due_at if self._stopped_by is None else now)

    def departure(self) -> SluiceError:
        """Return why the caller does not wait any more: it ends its call by its own clock, or goes."""
        if self.log.left is None:
            passed_s = time.monotonic() - self.arrived_at
            is_late = passed_s >= _ROUNDING * self.request.timeout_s
            self.log.left = DeadlinePassed(self.kind.late) if is_late else Cancelled(CALLER_GONE)
        return self.log.left

    def error_of(self, error: BaseException) -> SluiceError:
        """Return what the caller gets of a request that `error` ended."""
        if isinstance(error, SluiceError):
            return error
        if isinstance(error, asyncio.CancelledError):
            return self.departure()
        return internal_error()
