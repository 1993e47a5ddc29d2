"""The guard models of one request: asks what is due beside the generation, and steers the stream by the outcomes."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from gateway.admission.pipeline import AdmittedRequest
from gateway.admission.prompts import PreparedPrompt
from gateway.safety.actions import Action
from gateway.safety.guards.checks import Check, Checks, Cost, Decided
from gateway.safety.guards.families import Failure, Message
from gateway.streaming.stream import Stream
from gateway.telemetry.spans import CallSpans
from gateway.upstream.guard_client import Asking
from gateway.upstream.guard_prompts import Question
from gateway.upstream.tasks import leg_of
from gateway.validation.conversation import SYSTEM, Conversation
from gateway.validation.requests import ValidRequest
from sluice.errors import InternalError, SafetyBlocked, SluiceError
from sluice.telemetry import names
from sluice.telemetry.tracing import headers_of

_log = logging.getLogger(__name__)

Send = Callable[[Stream, PreparedPrompt], None]
"""Sends the task of a stream's leg."""
_GOVERNED: Final = "r"


@dataclass(frozen=True)
class Asked:
    """The request that is guarded."""

    request: ValidRequest
    admitted: AdmittedRequest
    spans: CallSpans
    send: Send


class Guarding:
    """`gateway.streaming.ticket.Guards` of one request.

    Attributes:
        checks: which are due, and what came of them.
    """

    def __init__(self, asking: Asking, asked: Asked) -> None:
        self.checks = Checks(asked.admitted.guards)
        self._asking = asking
        self._asked = asked
        self._turns = _turns(asked.admitted.conversation)
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, stream: Stream) -> None:
        """See `Guards.begin`."""
        self._launch(stream, self.checks.begin())
        self._asking.rows.registry.released(stream, time.monotonic())

    def produced(self, stream: Stream, *, ended: bool) -> None:
        """See `Guards.produced`."""
        leg = stream.leg
        due = self.checks.produced(len(leg.transcript.token_ids), lambda: leg.said, ended)
        self._launch(stream, due)

    def restart(self) -> None:
        """See `Guards.restart`."""
        self.checks.restart()

    def close(self) -> None:
        """See `Guards.close`."""
        self.checks.close()
        for task in self._running:
            task.cancel()

    def _launch(self, stream: Stream, due: list[Check]) -> None:
        for check in due:
            task = asyncio.ensure_future(self._run(stream, check))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self, stream: Stream, check: Check) -> None:
        try:
            decided = await self._decided(stream, check)
        except Exception:  # the task would die silently, and the answer would wait for its verdict
            _log.exception("request %s: a check failed", stream.request_id)
            decided = self.checks.decide(check, Failure.FAILED)
        try:
            if decided is not None:
                await self._follow(stream, decided)
        except Exception:  # the same
            _log.exception("request %s: a verdict could not be followed", stream.request_id)
            error = InternalError("a verdict of the safety policy could not be followed")
            self._asking.rows.registry.fail(stream, error)

    async def _decided(self, stream: Stream, check: Check) -> Decided | None:
        with self._asked.spans.hop(names.SPAN_GUARD, attributes=_told_before(check)) as span:
            start = time.monotonic()
            outcome, cost = await self._asking.ask(
                Question(
                    check,
                    self._asked.request,
                    self._asked.admitted.scheduling,
                    self._turns,
                    headers_of(span),
                    f"{stream.request_id}-g{check.number}",
                )
            )
            took_ms = (time.monotonic() - start) * 1000
            decided = self.checks.decide(check, outcome, Cost(took_ms, cost))
            if decided is not None:
                _tell(span, decided)
            return decided

    async def _follow(self, stream: Stream, decided: Decided) -> None:
        registry, now = self._asking.rows.registry, time.monotonic()
        if decided.action is Action.BLOCK and decided.check.in_answer:
            registry.block(stream, decided.rules, now)
        elif decided.action is Action.BLOCK:
            registry.fail(stream, self._blocked(decided))
        elif decided.action is Action.ROUTE:
            await self._reroute(stream, decided)
        else:
            self._go_on(stream)

    async def _reroute(self, stream: Stream, decided: Decided) -> None:
        name = decided.check.guard.settings.action.model
        assert name is not None, "a route has a model"
        stream.stay()
        if stream.leg.model == name:
            self.checks.followed(decided.check)
            self._go_on(stream)
            return
        try:
            prepared = await self._asked.admitted.prepare_for(name)
        except SluiceError as error:
            self._asking.rows.registry.fail(stream, error)
            return
        request = self._asked.request
        row_id = f"{stream.request_id}-{_GOVERNED}{decided.check.number}"
        leg = leg_of(request, prepared, row_id, (), self._asking.rows.stall_s, time.monotonic())
        self.checks.followed(decided.check)
        if self._asking.rows.registry.reroute(stream, leg, ", ".join(decided.rules)):
            self._asked.send(stream, prepared)

    def _go_on(self, stream: Stream) -> None:
        if not stream.ended and not stream.holding:
            self.produced(stream, ended=stream.row_ended)  # what has grown meanwhile
        self._asking.rows.registry.released(stream, time.monotonic())

    def _blocked(self, decided: Decided) -> SafetyBlocked:
        rules, policy = decided.rules, self._asked.admitted.policy
        return SafetyBlocked(
            f"the safety policy {policy} blocks the prompt: {', '.join(rules)}",
            metadata={"rules": ",".join(rules), "policy": policy},
        )


def _turns(conversation: Conversation) -> list[Message]:
    """As guards take them: without the operator's own message."""
    return [
        {"role": turn.role, "content": turn.content}
        for turn in conversation.turns
        if turn.role != SYSTEM
    ]


def _told_before(check: Check) -> dict[str, AttributeValue]:
    return {
        names.GEN_AI_OPERATION: names.GUARDRAIL_OPERATION,
        names.GEN_AI_REQUEST_MODEL: check.guard.settings.model,
        names.GUARDRAIL_NAME: check.guard.name,
        names.GUARDRAIL_TARGET: "output" if check.in_answer else "input",
    }


def _tell(span: Span, decided: Decided) -> None:
    span.set_attribute(names.GUARDRAIL_ACTION, decided.action.name.lower())
    pairs = [f"{rule}:{action.name.lower()}" for rule, action in decided.taken]
    span.set_attribute(names.GUARDRAIL_OUTCOMES, pairs)
    if decided.score is not None:
        span.set_attribute(names.GUARDRAIL_SCORE, decided.score)
