"""What the gateway knows of one request, from its first byte to the last.

`RequestContext` is made when the message has been read and validated. `gateway.admission.admission` fills in what it
decides, and every later step takes the context. An answer's messages come from `gateway.streaming`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import grpc

from gateway.admission.call import internal_error
from gateway.admission.overload import SchedulingParams
from gateway.admission.policies import Policies
from gateway.admission.prompts import PreparedPrompt
from gateway.identity.resume_token import ResumeKey, ResumeToken
from gateway.models.catalog import ServedModel
from gateway.routing.budget import Reservation
from gateway.routing.plan import Plan
from gateway.routing.router import CHARS_PER_TOKEN
from gateway.safety.inspector import RequestInspection
from gateway.telemetry.request_log import CALLER_GONE, RequestLog
from gateway.validation.conversation import Conversation
from gateway.validation.requests import ValidRequest
from sluice.errors import Cancelled, DeadlinePassed, SluiceError
from sluice.v1.inference_pb2 import Route, Started

logger = logging.getLogger(__name__)

_ROUNDING: Final = 0.98
"""Share of a timeout after which a caller that goes is late: gRPC rounds deadlines by 1 %."""
_T = TypeVar("_T")

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


class RequestContext:
    """A valid request, how long it may take, and all that is decided about it.

    Attributes:
        kind: The method that was called.
        request: The request as it was sent.
        log: What happens to it.
        request_id: Its id.
        answer_id: The id of the request whose answer it reads: an earlier one, where an idempotency key names that.
        key: Its idempotency key; empty without one.
        fingerprint: Equal for equal requests.
        tenant: Who pays.
        priority_class: Its class.
        arrived_at: When it came, in monotonic seconds.
        deadline: When it fails, in monotonic seconds.
        with_logprobs: Whether the caller wants log-probabilities.
        timings: Returns the timings of its answer.
        conversation: Its texts as a model may see them.
        to_prompts: Makes the prompts of a request about texts; None for a request that one answer is for.
        policies: What decides about it; taken once, when it is admitted.
        scheduling: What the expected time of its answer depends on.
        inspection: What was found in its texts, by the policy in force.
        plan: Where it is routed.
        prompts: One prompt, or one for each text, pair or answer of a request about texts, in order.
        second: The prompt for the second model of a cascade.
        reservation: What it may use of its tenant's limits and budget; settled when the request ends.
    """

    policies: Policies
    scheduling: SchedulingParams
    inspection: RequestInspection
    plan: Plan
    prompts: Sequence[PreparedPrompt]
    reservation: Reservation

    def __init__(
        self,
        kind: RequestKind,
        request: ValidRequest,
        log: RequestLog,
        resume_key: ResumeKey | None = None,
        to_prompts: TextsToPrompts | None = None,
    ) -> None:
        """Begin with a valid request; `resume_key` signs the tokens that callers resume its answer with."""
        self.kind = kind
        self.request = request
        self.log = log
        self.request_id = self.answer_id = log.request_id
        self.key = request.key
        self.fingerprint = request.fingerprint
        self.tenant = request.tenant
        self.priority_class = request.priority_class
        self.arrived_at = log.arrived_at
        self.deadline = log.arrived_at + request.timeout_s
        self.with_logprobs = request.sampling.HasField("logprobs")
        self.timings = log.timings
        self.conversation = request.conversation
        self.to_prompts = to_prompts
        self.second: PreparedPrompt | None = None
        self._resume_key = resume_key
        self._timeout: asyncio.Timeout | None = None
        self._stopped_by: SluiceError | None = None

    def use(self, policies: Policies) -> None:
        """Decide by `policies` from now on."""
        request, conversation = self.request, self.request.conversation
        chars = sum(map(len, conversation.texts))
        self.policies = policies
        self.scheduling = SchedulingParams(
            self.priority_class,
            self.deadline,
            tenant=self.tenant,
            rules=policies.overload,
            allow_degraded=request.allow_degraded,
            workload=request.workload,
            prompt_tokens=chars // CHARS_PER_TOKEN + conversation.sent_tokens,
            min_tokens=request.sampling.min_tokens,
            max_tokens=request.sampling.max_tokens,
        )

    @property
    def first(self) -> PreparedPrompt:
        """The prompt for the model that is asked first."""
        return self.prompts[0]

    def started(self) -> Started:
        """Return the first event of its answer."""
        plan, route, first = self.plan, self.plan.route, self.first
        return Started(
            request_id=self.log.request_id,
            trace_id=self.log.trace_id,
            model=plan.model,
            route=Route(
                tier=plan.tier,
                strategy=route.strategy,
                reason=route.reason,
                degraded=route.degraded,
            ),
            seed=first.sampling.seed,
            prompt_tokens=len(first.prompt_token_ids),
        )

    def resume_token(self, model: str) -> ResumeToken:
        """Return the resume token of an answer of `model`; another version of the model does not continue it."""
        assert self._resume_key is not None, "it has an answer"
        prompts, sampling = (self.first, self.second), self.first.sampling
        task_names = {
            prompt.model.name: prompt.model.settings.task_name for prompt in prompts if prompt
        }
        seed = sampling.seed if sampling.temperature > 0 else 0
        return self._resume_key.token(self.fingerprint, task_names.get(model, model), seed)

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
            _log_failure(error, self.tenant)
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


def _log_failure(error: SluiceError, tenant: str) -> None:
    """Log the error of a request: with its message only if that is none of the caller's text."""
    if error.code is grpc.StatusCode.INTERNAL:
        logger.warning("%s of tenant %s: %s", error.reason, tenant, error.message)
    else:
        logger.debug("%s of tenant %s", error.reason, tenant)
