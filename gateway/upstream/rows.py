"""Rows on their way to the batchers: those of callers' requests, and those that the gateway itself asks for."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.admission.overload import OverloadControl
from gateway.admission.pipeline import Admission, AdmittedRequest
from gateway.admission.prompts import PreparedPrompt
from gateway.admission.usage import UsageAccounting
from gateway.identity.resume_token import ResumeKey
from gateway.streaming.assembler import Assembler
from gateway.streaming.lifecycle import RequestTimings, StreamSpec
from gateway.streaming.registry import Registry
from gateway.streaming.row import Row
from gateway.streaming.sent_row import SentRow
from gateway.streaming.transcript import Transcript
from gateway.upstream.nats_transport import NatsTransport
from gateway.validation.requests import ValidRequest
from sluice.errors import Cancelled
from sluice.internal.v1.task_pb2 import Sampling, Task
from sluice.telemetry import names
from sluice.telemetry.tracing import headers_of
from sluice.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FinishReason,
    Route,
    RouteStrategy,
    Started,
)
from sluice.wire import subjects
from sluice.wire.enums import value_of
from sluice.wire.tokens import VisibleToken

WATCHED_GATHER_MS: Final = 250
"""Tokens of an answer that the gateway may end, at a stop string, or give to another model, are gathered for this long
at most: more would be computed in vain."""
WHOLE_MS: Final = 3_600_000
"""So long are tokens gathered of which nobody reads a part."""

_UNREAD: Final = Started()
"""The first event of what no caller reads."""


@dataclass(frozen=True)
class Upstream:
    """Sends rows; holds what all of them share."""

    admission: Admission
    overload: OverloadControl
    usage: UsageAccounting
    registry: Registry
    transport: NatsTransport
    stall_s: float

    def new_row(
        self,
        request: ValidRequest,
        prepared: PreparedPrompt,
        row_id: str,
        held: Sequence[VisibleToken] = (),
        *,
        counts_prompt: bool = True,
    ) -> Row:
        """A row of a model's attempt at the answer.

        ``held`` are the tokens that the caller was shown before; ``counts_prompt``: no other answer counts the prompt.
        """
        model, inspection = prepared.model, prepared.inspect and prepared.inspect()
        transcript = Transcript(
            model.tokenizer.detokenizer(tools=request.tools is not None),
            tuple(request.sampling.stop),
            model.tokenizer.stop_token_ids.union(request.sampling.stop_token_ids),
            model.tokenizer.token_text,
            inspection.filter if inspection else None,
            held,
            request.sampling.logprobs if request.sampling.HasField("logprobs") else None,
        )
        for token_id in _before_hidden(held):
            if not transcript.closed:  # the held tokens may contain a stop string
                transcript.append(token_id)
        assembler = Assembler(len(transcript.token_ids), self.stall_s, time.monotonic())
        prompt_tokens = len(prepared.prompt_token_ids) if counts_prompt else 0
        return Row(
            row_id,
            model.name,
            prompt_tokens,
            transcript,
            assembler,
            inspection,
            frozenset(request.sampling.stop_token_ids),
            resumed=len(held),
            facts=model.facts,
        )

    def task_of(self, row: Row, request: ValidRequest, prepared: PreparedPrompt) -> Task:
        """The task of ``row``; `Dispatch` adds what it has of the answer, and the time that is left."""
        return Task(
            request_id=row.row_id,
            gateway=self.transport.gateway_id,
            model=prepared.model.settings.task_name,
            tenant=request.tenant,
            priority_class=request.priority_class,
            prompt_token_ids=prepared.prompt_token_ids,
            sampling=prepared.sampling,
            workload=request.workload,
            gather_ms=request.gather_ms,
            values=prepared.values,
            audio=prepared.audio,
        )

    def send(self, context: AdmittedRequest, row: Row, prepared: PreparedPrompt) -> None:
        """Sends ``row`` for the request; returns at once."""
        row.sent = True
        begun, task = time.monotonic(), self.task_of(row, context.request, prepared)
        watched = context.request.sampling.stop or context.second is not None
        if watched and task.gather_ms > WATCHED_GATHER_MS:
            task.gather_ms = WATCHED_GATHER_MS
        if prepared is context.first:  # the second model's row did not wait for admission
            task.waited_us = round((begun - context.timings.arrived_at) * 1e6)
        headers = row_headers(context, row)

        def on_taken() -> None:
            context.timings.publish_ms += (time.monotonic() - begun) * 1000

        self.send_row(SentRow(task, headers, row, context.deadline, on_taken=on_taken))

    def send_row(self, row: SentRow) -> None:
        """Sends a row, or fails it at once when that is impossible."""
        now, task = time.monotonic(), row.task
        tokens = len(task.prompt_token_ids) + task.sampling.max_tokens
        self.overload.sent(row.attempt.model, task.model, task.priority_class, tokens, now)
        problem = self.transport.problem()
        if problem is None:
            self.registry.dispatch.send(row, now)
        else:
            row.taken()
            # Later: the answer may not know its new row yet.
            loop = asyncio.get_running_loop()
            loop.call_soon(self.registry.publish_failed, row.row_id, problem)


class InternalRow:
    """A row that the gateway itself wants an answer to: a guard's question, a shadow, a text. No caller reads it.

    Attributes:
        attempt: its tokens or values.
        result: how it ended.
    """

    def __init__(
        self,
        upstream: Upstream,
        request: ValidRequest,
        prepared: PreparedPrompt,
        row_id: str,
        deadline: float,
    ) -> None:
        """``request`` gives tenant, class and workload; at ``deadline`` the row fails with `DeadlinePassed`."""
        self._upstream = upstream
        self._ended = asyncio.Event()
        self.attempt = upstream.new_row(request, prepared, row_id)
        timings = RequestTimings(time.monotonic())
        spec = StreamSpec(_UNREAD, deadline, False, timings, request.tenant, request.priority_class)
        self.result = upstream.registry.compute(spec, self.attempt, self._ended.set)
        self._task = upstream.task_of(self.attempt, request, prepared)
        self._task.gather_ms = WHOLE_MS
        self.attempt.sent = True

    async def answer(self, headers: Mapping[str, str]) -> None:
        """Sends the row with the trace context ``headers``, and waits for its end; a cancelled caller cancels it.

        Raises:
            SluiceError: there is no answer.
        """
        try:
            self.send(headers)
            await self.ended()
        finally:
            self.close()

    def send(self, headers: Mapping[str, str]) -> None:
        """Sends the row with the trace context ``headers``; it must be closed."""
        deadline = self.result.spec.deadline
        self._upstream.send_row(SentRow(self._task, headers, self.attempt, deadline))

    async def ended(self) -> None:
        """The row has ended.

        Raises:
            SluiceError: there is no answer.
        """
        await self._ended.wait()
        if self.result.error is not None:
            raise self.result.error

    def close(self) -> None:
        """Cancels the row, unless it has ended."""
        self.result.fail(Cancelled("nobody waits for the answer any more"))


def stream_spec(context: AdmittedRequest, resume_key: ResumeKey) -> StreamSpec:
    """What is fixed about the stream of a request."""
    request, plan, first = context.request, context.plan, context.first
    seed = first.sampling.seed if first.sampling.temperature > 0 else 0
    models = [one.model for one in (first, context.second) if one]
    task_names = {model.name: model.settings.task_name for model in models}
    route = Route(
        tier=plan.tier,
        strategy=value_of(RouteStrategy, plan.strategy),
        reason=plan.reason,
        degraded=plan.degraded,
    )
    started = Started(
        request_id=context.request_id,
        trace_id=context.spans.trace_id,
        model=plan.model,
        route=route,
        seed=first.sampling.seed,
        prompt_tokens=len(first.prompt_token_ids),
    )
    return StreamSpec(
        started=started,
        deadline=context.deadline,
        with_logprobs=request.sampling.HasField("logprobs"),
        timings=context.timings,
        tenant=request.tenant,
        priority_class=request.priority_class,
        key=request.key,
        fingerprint=request.fingerprint,
        # Tokens of one version of a model are not continued by another.
        resume_token=lambda model: resume_key.token(
            request.fingerprint, task_names.get(model, model), seed
        ),
    )


def row_headers(context: AdmittedRequest, row: Row) -> Mapping[str, str]:
    """Begins the span of ``row``; what its tasks carry of it."""
    attributes = row_attributes(row.model, row.row_id, context.request.priority_class)
    return headers_of(context.spans.start_attempt(row.row_id, attributes))


def row_attributes(model: str, row_id: str, priority_class: str) -> Mapping[str, str]:
    """Of the span of a row, or of several that are sent together."""
    return {
        names.GEN_AI_REQUEST_MODEL: model,
        names.REQUEST_ID: row_id,
        names.MESSAGING_SYSTEM: "nats",
        names.MESSAGING_OPERATION: "send",
        names.MESSAGING_DESTINATION: subjects.tasks(model, priority_class),
    }


def already_complete(sampling: Sampling, transcript: Transcript) -> "FinishReason.ValueType | None":
    """Why nothing is left to compute after the held tokens, or None. `Answer.finish` finds stop strings itself."""
    held = transcript.token_ids
    if transcript.closed or (held and held[-1] in sampling.stop_token_ids):
        return FINISH_REASON_STOP
    if len(held) >= sampling.max_tokens:
        return FINISH_REASON_LENGTH
    return None


def _before_hidden(held: Sequence[VisibleToken]) -> Iterator[int]:
    """The tokens before the first that was hidden from the caller; from there on the answer is computed again."""
    for token_id in held:
        if token_id is None:
            return
        yield token_id
