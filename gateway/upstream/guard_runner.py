"""The guard models of one request: starts the checks that are due beside the generation, and acts on their verdicts."""

import asyncio
import logging
import time

from gateway.admission.pipeline import AdmittedRequest
from gateway.safety.actions import Action
from gateway.safety.findings import Finding
from gateway.safety.guards.checks import Check, Checks, Cost, Decided
from gateway.safety.guards.families import Failure, Message, Outcome
from gateway.safety.output.windows import Window
from gateway.streaming.answer import Answer
from gateway.streaming.row import Row
from gateway.upstream.guard_client import GuardClient
from gateway.validation.conversation import SYSTEM, TOOL, USER, Conversation
from sluice.background import BackgroundTasks
from sluice.errors import InternalError, SafetyBlocked, SluiceError

_log = logging.getLogger(__name__)


class GuardRunner:
    """Implements `gateway.streaming.answer.Guards` for one request.

    Attributes:
        checks: which are due, and their outcomes.
    """

    def __init__(self, client: GuardClient, context: AdmittedRequest) -> None:
        self.checks = Checks(context.inspection.guards)
        self._client = client
        self._upstream = client.upstream
        self._context = context
        self._turns = _turns(context.conversation)
        self._running = BackgroundTasks()

    def check_prompt(self, answer: Answer) -> None:
        """Starts the checks of the prompt; the row of the answer is on its way already."""
        self._start(answer, self.checks.begin())
        answer.verdict_passed(time.monotonic())

    def check_answer(self, answer: Answer, *, ended: bool) -> None:
        """The answer of ``answer`` has grown, or ended; it is `Guards.check_answer`."""
        attempt = answer.current
        due = self.checks.produced(attempt.completion_tokens, lambda: attempt.raw_text, ended)
        self._start(answer, due)
        self._read_next(answer, attempt)

    def close(self) -> None:
        """The request has ended: cancels the checks that run."""
        self.checks.close()
        self._running.cancel()

    def _start(self, answer: Answer, due: list[Check]) -> None:
        for check in due:
            self._running.spawn(self._run(answer, check))

    def _read_next(self, answer: Answer, attempt: Row) -> None:
        """Token classifiers read the next part of the answer, when it is there."""
        window = attempt.next_window()
        if window is not None:
            self._running.spawn(self._read(answer, attempt, window))

    async def _read(self, answer: Answer, attempt: Row, window: Window) -> None:
        try:
            decided, found = await self._entities(attempt, window)
            now = time.monotonic()
            blocking = [rule for one in decided if one.action is Action.BLOCK for rule in one.rules]
            if answer.current is attempt and blocking:
                answer.block(tuple(blocking), now)
                return
            answer.settle(attempt, window, found, now)
            self._continue(answer)
        except Exception:  # the task would die silently, and the answer would wait for it
            _log.exception("request %s: entities could not be found", answer.request_id)
            error = InternalError("a token classifier of the safety policy failed")
            answer.fail(error)

    async def _entities(self, attempt: Row, window: Window) -> tuple[list[Decided], list[Finding]]:
        """What is recorded of each classifier, and all that they found in ``window``."""
        context, guards = self._context, self._context.inspection.answer_readers
        checks = [self.checks.reading(one, attempt.completion_tokens) for one in guards]
        readings = await asyncio.gather(
            *(self._client.read(context, check, [window.text]) for check in checks)
        )
        both = list(zip(checks, readings, strict=True))
        decided = [self.checks.read(check, one.taken(check), one.cost) for check, one in both]
        outcomes = [one.outcome for one in readings if not isinstance(one.outcome, Failure)]
        return decided, [found for outcome in outcomes for found in outcome[0]]

    async def _run(self, answer: Answer, check: Check) -> None:
        outcome: Outcome
        try:
            outcome, cost = await self._client.ask(self._context, check, self._turns)
        except Exception:  # the task would die silently, and the answer would wait for its verdict
            _log.exception("request %s: a check failed", answer.request_id)
            outcome, cost = Failure.FAILED, Cost()
        decided = self.checks.decide(check, outcome, cost)
        try:
            if decided is not None:
                await self._act(answer, decided)
        except Exception:  # the task would die silently, and the answer would wait for its verdict
            _log.exception("request %s: a verdict could not be applied", answer.request_id)
            error = InternalError("a verdict of the safety policy could not be applied")
            answer.fail(error)

    async def _act(self, answer: Answer, decided: Decided) -> None:
        if decided.action is Action.BLOCK and decided.check.in_answer:
            answer.block(decided.rules, time.monotonic())
        elif decided.action is Action.BLOCK:
            answer.fail(self._blocked(decided))
        elif decided.action is Action.ROUTE:
            await self._reroute(answer, decided)
        else:
            self._continue(answer)

    async def _reroute(self, answer: Answer, decided: Decided) -> None:
        model = decided.check.guard.settings.action.model
        assert model is not None, "a route has a model"
        answer.commit()
        if answer.current.model == model:
            self.checks.followed(decided.check)
            self._continue(answer)
            return
        try:
            prepared = await self._upstream.admission.prepare_for(self._context, model)
        except SluiceError as error:
            answer.fail(error)
            return
        row_id = f"{answer.request_id}-r{decided.check.number}"
        attempt = self._upstream.new_row(self._context.request, prepared, row_id)
        self.checks.followed(decided.check)
        if answer.reroute(attempt, ", ".join(decided.rules)):
            self._upstream.send(self._context, attempt, prepared)

    def _continue(self, answer: Answer) -> None:
        if not answer.ended and not answer.holding:
            self.check_answer(answer, ended=answer.row_ended)  # it may have grown meanwhile
        answer.verdict_passed(time.monotonic())

    def _blocked(self, decided: Decided) -> SafetyBlocked:
        rules, policy = decided.rules, self._context.inspection.policy.version
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
