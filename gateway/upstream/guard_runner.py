"""The guard models of one request: starts the checks that are due beside the generation, and acts on their verdicts."""

import logging
import time

from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from gateway.safety.actions import Action
from gateway.safety.guards.checks import Check, Checks, Cost, Decided
from gateway.safety.guards.families import Failure, Message
from gateway.streaming.cascade_state import REROUTED
from gateway.streaming.stream import Stream
from gateway.upstream.guard_client import GuardClient, Question
from gateway.upstream.rows import RequestContext
from gateway.validation.conversation import SYSTEM, TOOL, USER, Conversation
from sluice.background import BackgroundTasks
from sluice.errors import InternalError, SafetyBlocked, SluiceError
from sluice.telemetry import names
from sluice.telemetry.tracing import headers_of

_log = logging.getLogger(__name__)


class GuardRunner:
    """Implements `gateway.streaming.stream.Guards` for one request.

    Attributes:
        checks: which are due, and their outcomes.
    """

    def __init__(self, client: GuardClient, context: RequestContext) -> None:
        self.checks = Checks(context.admitted.guards)
        self._client = client
        self._upstream = client.upstream
        self._registry = client.upstream.registry
        self._context = context
        self._turns = _turns(context.admitted.conversation)
        self._running = BackgroundTasks()

    def check_prompt(self, stream: Stream) -> None:
        """Starts the checks of the prompt; the row of the answer is on its way already."""
        self._start(stream, self.checks.begin())
        self._registry.verdict_passed(stream, time.monotonic())

    def check_answer(self, stream: Stream, *, ended: bool) -> None:
        """See `Guards.check_answer`."""
        attempt = stream.current
        due = self.checks.produced(attempt.completion_tokens, lambda: attempt.raw_text, ended)
        self._start(stream, due)

    def close(self) -> None:
        """The request has ended: cancels the checks that run."""
        self.checks.close()
        self._running.cancel()

    def _start(self, stream: Stream, due: list[Check]) -> None:
        for check in due:
            self._running.spawn(self._run(stream, check))

    async def _run(self, stream: Stream, check: Check) -> None:
        try:
            decided = await self._decide(check)
        except Exception:  # the task would die silently, and the answer would wait for its verdict
            _log.exception("request %s: a check failed", stream.request_id)
            decided = self.checks.decide(check, Failure.FAILED)
        try:
            if decided is not None:
                await self._act(stream, decided)
        except Exception:  # the task would die silently, and the answer would wait for its verdict
            _log.exception("request %s: a verdict could not be applied", stream.request_id)
            error = InternalError("a verdict of the safety policy could not be applied")
            self._registry.fail(stream, error)

    async def _decide(self, check: Check) -> Decided | None:
        context = self._context
        with context.spans.hop(names.SPAN_GUARD, attributes=_check_attributes(check)) as span:
            start = time.monotonic()
            question = Question(check, context, self._turns, headers_of(span))
            outcome, cost = await self._client.ask(question)
            took_ms = (time.monotonic() - start) * 1000
            decided = self.checks.decide(check, outcome, Cost(took_ms, cost))
            if decided is not None:
                _set_outcome(span, decided)
            return decided

    async def _act(self, stream: Stream, decided: Decided) -> None:
        if decided.action is Action.BLOCK and decided.check.in_answer:
            self._registry.block(stream, decided.rules, time.monotonic())
        elif decided.action is Action.BLOCK:
            self._registry.fail(stream, self._blocked(decided))
        elif decided.action is Action.ROUTE:
            await self._reroute(stream, decided)
        else:
            self._continue(stream)

    async def _reroute(self, stream: Stream, decided: Decided) -> None:
        model = decided.check.guard.settings.action.model
        assert model is not None, "a route has a model"
        stream.cascade.commit(REROUTED)
        if stream.current.model == model:
            self.checks.followed(decided.check)
            self._continue(stream)
            return
        try:
            prepared = await self._context.admitted.prepare_for(model)
        except SluiceError as error:
            self._registry.fail(stream, error)
            return
        row_id = f"{stream.request_id}-r{decided.check.number}"
        attempt = self._upstream.new_attempt(self._context.request, prepared, row_id)
        self.checks.followed(decided.check)
        if self._registry.reroute(stream, attempt, ", ".join(decided.rules)):
            self._upstream.send(self._context, attempt, prepared)

    def _continue(self, stream: Stream) -> None:
        if not stream.ended and not stream.cascade.holding:
            self.check_answer(stream, ended=stream.row_ended)  # it may have grown meanwhile
        self._registry.verdict_passed(stream, time.monotonic())

    def _blocked(self, decided: Decided) -> SafetyBlocked:
        rules, policy = decided.rules, self._context.admitted.policy
        return SafetyBlocked(
            f"the safety policy {policy} blocks the prompt: {', '.join(rules)}",
            metadata={"rules": ",".join(rules), "policy": policy},
        )


def _turns(conversation: Conversation) -> list[Message]:
    """The turns for guards: without the operator's own message. Results of tools are input, as the user's turns are."""
    turns: list[Message] = []
    for turn in conversation.turns:
        if turn.role == TOOL and turns and turns[-1]["role"] == USER:
            turns[-1] = {"role": USER, "content": f"{turns[-1]['content']}\n{turn.content}"}
        elif turn.role != SYSTEM:
            role = USER if turn.role == TOOL else turn.role
            turns.append({"role": role, "content": turn.content})
    return turns


def _check_attributes(check: Check) -> dict[str, AttributeValue]:
    return {
        names.GEN_AI_OPERATION: names.GUARDRAIL_OPERATION,
        names.GEN_AI_REQUEST_MODEL: check.guard.settings.model,
        names.GUARDRAIL_NAME: check.guard.name,
        names.GUARDRAIL_TARGET: "output" if check.in_answer else "input",
    }


def _set_outcome(span: Span, decided: Decided) -> None:
    span.set_attribute(names.GUARDRAIL_ACTION, decided.action.name.lower())
    pairs = [f"{rule}:{action.name.lower()}" for rule, action in decided.taken]
    span.set_attribute(names.GUARDRAIL_OUTCOMES, pairs)
    if decided.score is not None:
        span.set_attribute(names.GUARDRAIL_SCORE, decided.score)
