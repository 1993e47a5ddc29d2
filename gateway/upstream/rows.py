"""Rows on their way to the batchers: those of callers' requests, and those that the gateway itself asks for."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from gateway.admission.call import fail_with
from gateway.admission.overload import OverloadControl, SchedulingParams
from gateway.admission.preparation import Preparation
from gateway.admission.prompts import PreparedPrompt
from gateway.admission.request_context import RequestContext
from gateway.admission.usage import UsageAccounting
from gateway.streaming.answer import Answer
from gateway.streaming.registry import Registry
from gateway.streaming.room import SentRow
from gateway.streaming.row import Row
from gateway.streaming.transcript import Transcript
from gateway.upstream.nats_transport import NatsTransport
from gateway.validation.requests import ValidRequest
from sluice.background import BackgroundTasks
from sluice.errors import RETRY_AFTER_S, Cancelled, SluiceError, TransportUnavailable
from sluice.internal.v1.task_pb2 import Sampling, Task
from sluice.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FinishReason,
)
from sluice.wire.tokens import VisibleToken

WATCHED_GATHER_MS: Final = 250
"""Tokens of an answer that the gateway may end, at a stop string, or give to another model, are gathered for this long
at most: more would be computed in vain."""
WHOLE_MS: Final = 3_600_000
"""So long are tokens gathered of which nobody reads a part."""


@dataclass(frozen=True)
class Upstream:
    """Sends rows; holds what all of them share."""

    preparation: Preparation
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
        row = Row(
            row_id,
            prepared.model.name,
            len(prepared.prompt_token_ids) if counts_prompt else 0,
            None if prepared.values else partial(_open_text, request, prepared, held),
            self.stall_s,
            time.monotonic(),
            prepared.model.settings,
            frozenset(request.sampling.stop_token_ids),
            resumed=len(held),
        )
        if held:
            row.next_index = len(row.transcript.token_ids)
        return row

    def task_of(self, row: Row, request: ValidRequest, prepared: PreparedPrompt) -> Task:
        """The task of ``row``; `Dispatch` adds what it has of the answer, and the time that is left."""
        task = Task(
            request_id=row.row_id,
            gateway=self.transport.gateway_id,
            model=prepared.model.settings.task_name,
            tenant=request.tenant,
            priority_class=request.priority_class,
            prompt_token_ids=prepared.prompt_token_ids,
            sampling=prepared.sampling,
            workload=request.workload,
            coalesce_ms=request.coalesce_ms,
            values=prepared.values,
            audio=prepared.audio,
        )
        # The task's take 4 bytes a token, those of a list 36: they are kept while the row waits and runs.
        prepared.prompt_token_ids = task.prompt_token_ids
        return task

    def send(self, context: RequestContext, row: Row, prepared: PreparedPrompt) -> None:
        """Sends ``row`` for the request; returns at once."""
        row.sent = True
        begun, task = time.monotonic(), self.task_of(row, context.request, prepared)
        expected = self.overload.expect(row.model, _exact(context, prepared), begun)
        row.expected_s = expected.total_s if expected.is_total else 0.0
        watched = context.request.sampling.stop or context.second is not None
        if watched and task.coalesce_ms > WATCHED_GATHER_MS:
            task.coalesce_ms = WATCHED_GATHER_MS
        if prepared is context.first:  # the second model's row did not wait for admission
            task.waited_us = round((begun - context.arrived_at) * 1e6)
        headers = context.log.run_sent(row.row_id, row.model)

        def on_taken() -> None:
            context.log.publish_ms += (time.monotonic() - begun) * 1000

        self.send_row(SentRow(task, headers, row, context.deadline, on_taken=on_taken))

    def send_row(self, row: SentRow) -> None:
        """Sends a row, or fails it at once when that is impossible."""
        now, task = time.monotonic(), row.task
        tokens = len(task.prompt_token_ids) + task.sampling.max_tokens
        model, tenant = row.attempt.model, task.tenant
        self.overload.sent(model, task.model, task.priority_class, tokens, now, tenant)
        if self.transport.connected:
            self.registry.dispatch.send(row, now)
        else:
            row.taken()
            problem = TransportUnavailable("NATS is not connected", retry_after_s=RETRY_AFTER_S)
            # Later: the answer may not know its new row yet.
            loop = asyncio.get_running_loop()
            loop.call_soon(self.registry.publish_failed, task.request_id, problem)


def _exact(context: RequestContext, prepared: PreparedPrompt) -> SchedulingParams:
    """Return what the prediction of the time for ``prepared`` depends on."""
    sampling = prepared.sampling
    return SchedulingParams(
        context.priority_class,
        context.deadline,
        tenant=context.tenant,
        rules=context.scheduling.rules,
        workload=context.scheduling.workload,
        prompt_tokens=len(prepared.prompt_token_ids),
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
    )


@dataclass
class InternalRequest:
    """Whose internal run it is; see `gateway.streaming.row_result.RowRequest`."""

    tenant: str
    priority_class: str
    arrived_at: float
    deadline: float


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
        headers: Mapping[str, str],
    ) -> None:
        """``request`` gives tenant, class and workload; at ``deadline`` the row fails with `DeadlinePassed`.

        ``headers``: its trace context.
        """
        self._upstream = upstream
        self._ended = asyncio.Event()
        self.attempt = upstream.new_row(request, prepared, row_id)
        owner = InternalRequest(request.tenant, request.priority_class, time.monotonic(), deadline)
        self.result = upstream.registry.compute(owner, self.attempt, self._ended.set)
        task = upstream.task_of(self.attempt, request, prepared)
        task.coalesce_ms = WHOLE_MS
        self.attempt.sent = True
        self._row = SentRow(task, headers, self.attempt, deadline)

    @staticmethod
    async def answer(*rows: "InternalRow") -> None:
        """Sends ``rows``, and waits for their ends. When one fails, or the caller is cancelled, all are.

        Raises:
            SluiceError: there is no answer to one.
        """
        try:
            for row in rows:
                row._upstream.send_row(row._row)
            for row in rows:
                await row._ended.wait()
                if row.result.error is not None:
                    raise row.result.error
        finally:
            for row in rows:
                row.result.fail(Cancelled("nobody waits for the answer any more"))


class Beside:
    """Work beside the answer to a request, which ends with it; what fails there fails the answer."""

    def __init__(self) -> None:
        self._running = BackgroundTasks()

    def spawn(self, answer: Answer, work: Callable[[], Awaitable[None]]) -> None:
        """Runs ``work``."""
        self._running.spawn(self._run(answer, work))

    def close(self) -> None:
        """The request has ended: cancels what runs."""
        self._running.cancel()

    async def _run(self, answer: Answer, work: Callable[[], Awaitable[None]]) -> None:
        async def fail(error: SluiceError) -> None:
            answer.fail(error)

        await fail_with(work(), fail, answer.request_id)


def already_complete(sampling: Sampling, transcript: Transcript) -> "FinishReason.ValueType | None":
    """Why nothing is left to compute after the held tokens, or None. `Answer.finish` finds stop strings itself."""
    held = transcript.token_ids
    if transcript.closed or (held and held[-1] in sampling.stop_token_ids):
        return FINISH_REASON_STOP
    if len(held) >= sampling.max_tokens:
        return FINISH_REASON_LENGTH
    return None


def _open_text(
    request: ValidRequest, prepared: PreparedPrompt, held: Sequence[VisibleToken]
) -> Transcript:
    """The text of an answer that begins with ``held``."""
    tokenizer, sampling = prepared.model.tokenizer, request.sampling
    stops = tuple(sampling.stop)
    transcript = Transcript(
        tokenizer.detokenizer(tools=request.tools is not None, stops=stops),
        stops,
        tokenizer.stop_token_ids.union(sampling.stop_token_ids),
        tokenizer.token_text,
        prepared.inspect and prepared.inspect(),
        held,
        sampling.logprobs if sampling.HasField("logprobs") else None,
    )
    # From the first token that was hidden from the caller on, the answer is computed again.
    for token_id in held:
        if token_id is None or transcript.closed:  # they may contain a stop string
            break
        transcript.append(token_id)
    return transcript
