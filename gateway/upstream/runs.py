"""Runs on their way to the batchers: those of callers' requests, and those that the gateway itself needs.

A fallback is a smaller model that answers when the one that was asked fails before anything is shown. A model that is
known to be down or late is left out when the request is routed (`gateway.admission.overload`). A fallback is for the
failure that the request itself meets; they are used in the order of the configuration, each once.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from gateway.admission.overload import OverloadControl, SchedulingParams
from gateway.admission.prompts import ContextFit, Preparation
from gateway.admission.request_context import OpenFilter, PreparedPrompt, RequestContext, fail_with
from gateway.admission.tenant_limits import TenantLimits
from gateway.models.tokenizer import ModelTokenizer
from gateway.routing.router import price_of
from gateway.streaming.answer_stream import AnswerStream
from gateway.streaming.model_run import ModelRun, ResultCollector
from gateway.streaming.registry import Registry
from gateway.streaming.transcript import Transcript
from gateway.upstream.nats_transport import NatsTransport
from gateway.validation.requests import ValidRequest
from sluice import errors
from sluice.errors import SluiceError
from sluice.internal.v1.task_pb2 import Sampling, Task
from sluice.v1 import inference_pb2 as pb
from sluice.wire.tokens import VisibleToken

logger = logging.getLogger(__name__)

FAILURES: Final = (errors.EngineFailed, errors.ModelUnavailable, errors.Overloaded)
"""Errors of a run that another model may not meet; a request that is wrong stays wrong."""
WATCHED_GATHER_MS: Final = 250
"""Maximum time that a worker coalesces tokens of an answer which a stop string may end, or a cascade give to another
model, in milliseconds: more would be computed in vain."""
WHOLE_GATHER_MS: Final = 3_600_000
"""How long a worker coalesces tokens of which nobody reads a part, in milliseconds: until the end."""


@dataclass(frozen=True)
class Upstream:
    """Makes and sends runs; holds what all of them share."""

    preparation: Preparation
    overload: OverloadControl
    limits: TenantLimits
    registry: Registry
    transport: NatsTransport
    stall_s: float

    def new_run(
        self,
        request: ValidRequest,
        prepared: PreparedPrompt,
        run_id: str,
        deadline: float,
        held_ids: Sequence[VisibleToken] = (),
        *,
        counts_prompt: bool = True,
    ) -> ModelRun:
        """Make a run of a model, which is not sent yet.

        Args:
            request: what is asked.
            prepared: the prompt for the model.
            run_id: name of the run, unique; that of the first run is the request id.
            deadline: monotonic seconds.
            held_ids: tokens that the caller was shown before.
            counts_prompt: whether no other answer counts the prompt.
        """
        settings = prepared.model.settings
        task = Task(
            request_id=run_id,
            gateway=self.transport.gateway_id,
            model=prepared.model.task_name,
            tenant=request.tenant,
            priority_class=request.priority_class,
            prompt_token_ids=prepared.prompt_token_ids,
            sampling=prepared.sampling,
            workload=request.workload,
            coalesce_ms=request.coalesce_ms,
            values=prepared.values,
            audio=prepared.audio,
        )
        # The task needs 4 bytes a token, a list 36, and they are kept as long as the run.
        prepared.prompt_token_ids = task.prompt_token_ids
        run = ModelRun(
            task,
            prepared.model.name,
            settings,
            len(prepared.prompt_token_ids) if counts_prompt else 0,
            None
            if prepared.values
            else partial(
                _open_transcript, request, prepared.model.tokenizer, prepared.inspect, held_ids
            ),
            deadline,
            self.stall_s,
            time.monotonic(),
            frozenset(request.sampling.stop_token_ids),
            resumed=len(held_ids),
        )
        if held_ids:
            run.next_index = len(run.transcript.token_ids)
        return run

    def send(self, context: RequestContext, run: ModelRun) -> None:
        """Send a run for a caller's request; return at once."""
        now, task = time.monotonic(), run.task
        context.prompt_tokens = len(task.prompt_token_ids)  # estimated before
        expected = self.overload.outlook(run.model, context, now)
        run.expected_s = expected.total_s if expected.is_total else 0.0
        is_watched = context.request.sampling.stop or context.plan.cascade is not None
        if is_watched and task.coalesce_ms > WATCHED_GATHER_MS:
            task.coalesce_ms = WATCHED_GATHER_MS
        if run.run_id == context.request_id:  # later runs did not wait for admission
            task.waited_us = round((now - context.arrived_at) * 1e6)
        run.headers = context.log.run_sent(run.run_id, run.model)
        self._send(run)

    async def compute(
        self, runs: Sequence[ModelRun], on_end: Callable[[ResultCollector], object] = lambda _: None
    ) -> list[ResultCollector]:
        """Send runs whose results the gateway itself needs, and return these when all have ended.

        When one fails, or the caller is cancelled, all are cancelled: there is no use for a part of the results.

        Args:
            runs: of one request; no caller reads their tokens.
            on_end: called once with each result after it has ended, complete or not, before this returns or raises.

        Raises:
            SluiceError: a run failed; `DeadlinePassed` if it was past its deadline.
        """
        ended = asyncio.Queue[ResultCollector]()
        results = [ResultCollector(self.registry, run, ended.put_nowait) for run in runs]
        try:
            for run in runs:
                run.task.coalesce_ms = WHOLE_GATHER_MS
                self._send(run)
            for _ in runs:
                result = await ended.get()
                if result.error is not None:
                    raise result.error
        finally:
            for result in results:
                result.fail(errors.Cancelled("nobody waits for the answer any more"))
                on_end(result)
        return results

    def record_end(self, request: SchedulingParams, result: ResultCollector, now: float) -> int:
        """Book the cost of a result that has ended, and judge its models.

        Returns:
            The billed tokens of its prompts and answers.
        """
        tokens = 0
        for run in result.runs:
            if not run.is_sent:
                continue
            billed = run.billed_tokens
            tokens += sum(billed)
            cost = price_of(run.settings, *billed)
            self.limits.spending.add(request.tenant, cost, now)
            self.limits.days.add(request.tenant, cost, now)
            error = result.error if run is result.current else None
            if run.error is None:  # else it was counted when a fallback took over
                self.overload.record_result(request, run, error, now)
        return tokens

    def _send(self, run: ModelRun) -> None:
        """Give a run to `Dispatch`, or fail it when that is impossible."""
        now, task = time.monotonic(), run.task
        run.is_sent = True
        tokens = len(task.prompt_token_ids) + task.sampling.max_tokens
        self.overload.sent(run.model, task.model, task.priority_class, tokens, now, task.tenant)
        if self.transport.is_connected:
            self.registry.dispatch.send(run, now)
        else:
            problem = errors.TransportUnavailable("NATS is not connected")
            # Later: the answer may not know its new run yet.
            loop = asyncio.get_running_loop()
            loop.call_soon(self.registry.fail_send, run.run_id, problem)

    def fall_back(self, context: RequestContext, stream: AnswerStream, error: SluiceError) -> bool:
        """Start to look for a fallback of the current run, which failed with `error`.

        Returns False when none may or can answer; the stream ends with `error` then.
        """
        run = stream.current
        is_governed = context.plan.strategy == pb.ROUTE_STRATEGY_SAFETY
        if not context.allow_degraded or is_governed or not isinstance(error, FAILURES):
            return False
        now, failed = time.monotonic(), {run.model for run in stream.runs}
        candidates = [
            model
            for model in context.rules.fallbacks.get(run.model, ())
            if model not in failed and self.overload.outlook(model, context, now).problem is None
        ]
        if not candidates:
            return False
        # At once, and not with the end of the answer: others should not meet the failure meanwhile.
        self.overload.record_result(context, run, error, now)
        run.error = error
        spawn_beside(stream, partial(self._replace, context, stream, candidates, error))
        return True

    async def _replace(
        self,
        context: RequestContext,
        stream: AnswerStream,
        candidates: Sequence[str],
        error: SluiceError,
    ) -> None:
        """Send a run of the first candidate that has room for the prompt; raise `error` if none has."""
        failed = stream.current
        for model in candidates:
            # Its chat template may not know the tools, for example.
            with suppress(errors.InvalidRequest):
                contexts = ContextFit(context)
                prepared = await self.preparation.prepare_for(context, model, contexts)
                if prepared is not None:
                    break
        else:
            raise error
        prepared.sampling.seed = context.seed
        run_id = f"{context.request_id}-{len(stream.runs) + 1}"
        run = self.new_run(context.request, prepared, run_id, context.deadline)
        if not stream.replace_failed(failed, run, error.message):
            return
        cause = f"{failed.model} failed before its first token: {error.message}"
        context.plan.degrade(run.settings, cause)
        logger.info("request %s fell back to %s: %s", context.request_id, run.model, cause)
        self.send(context, run)


def spawn_beside(stream: AnswerStream, work: Callable[[], Awaitable[None]]) -> None:
    """Start `work` beside an answer, whose end cancels it; an error of `work` fails the answer."""

    async def fail(error: SluiceError) -> None:
        stream.fail(error)

    async def guarded() -> None:
        await fail_with(work(), fail, stream.request_id)

    stream.spawn(guarded())


def already_complete(
    sampling: Sampling, transcript: Transcript
) -> "pb.FinishReason.ValueType | None":
    """Return why nothing is left to compute after the tokens that the caller has, or None.

    `AnswerStream.finish` finds stop strings itself.
    """
    token_ids = transcript.token_ids
    if transcript.closed or (token_ids and token_ids[-1] in sampling.stop_token_ids):
        return pb.FINISH_REASON_STOP
    if len(token_ids) >= sampling.max_tokens:
        return pb.FINISH_REASON_LENGTH
    return None


def _open_transcript(
    request: ValidRequest,
    tokenizer: ModelTokenizer,
    open_filter: OpenFilter | None,
    held_ids: Sequence[VisibleToken],
) -> Transcript:
    """Return the text of an answer that begins with `held_ids`."""
    sampling = request.sampling
    stops = tuple(sampling.stop)
    transcript = Transcript(
        tokenizer.detokenizer(tools=request.tools is not None, stops=stops),
        stops,
        tokenizer.stop_token_ids.union(sampling.stop_token_ids),
        tokenizer.token_text,
        open_filter and open_filter(),
        held_ids,
        sampling.logprobs if sampling.HasField("logprobs") else None,
    )
    # From the first token that was hidden from the caller on, the answer is computed again.
    for token_id in held_ids:
        if token_id is None or transcript.closed:  # they may contain a stop string
            break
        transcript.append(token_id)
    return transcript
