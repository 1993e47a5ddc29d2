"""The guard models of one request: starts the checks that are due beside the generation, and acts on their verdicts."""

import asyncio
import time
from functools import partial

from typing_extensions import override

from gateway.admission.pipeline import AdmittedRequest
from gateway.safety.actions import Action
from gateway.safety.findings import Finding
from gateway.safety.guards.checks import Check, Checks, Decided
from gateway.safety.guards.families import Failure, Message
from gateway.safety.output.windows import Window
from gateway.streaming.answer import Answer
from gateway.streaming.row import Row
from gateway.upstream.guard_client import GuardClient
from gateway.upstream.rows import Beside
from gateway.validation.conversation import SYSTEM, TOOL, USER, Conversation
from sluice.errors import SafetyBlocked


class GuardRunner(Beside):
    """Implements `gateway.streaming.answer.Guards` for one request.

    Attributes:
        checks: which are due, and their outcomes.
    """

    def __init__(self, client: GuardClient, context: AdmittedRequest) -> None:
        super().__init__()
        self.checks = Checks(context.inspection.guards)
        self._client = client
        self._upstream = client.upstream
        self._context = context
        self._turns = _turns(context.conversation)

    def check_prompt(self, answer: Answer) -> None:
        """Starts the checks of the prompt; the row of the answer is on its way already."""
        self._start(answer, self.checks.begin())
        answer.verdict_passed(time.monotonic())

    def check_answer(self, answer: Answer, *, ended: bool) -> None:
        """The answer of ``answer`` has grown, or ended; it is `Guards.check_answer`."""
        attempt = answer.current
        due = self.checks.produced(attempt.completion_tokens, lambda: attempt.raw_text, ended)
        self._start(answer, due)
        window = attempt.next_window()
        if window is not None:
            failure = "a token classifier of the safety policy failed"
            self.spawn(answer, partial(self._read, answer, attempt, window), failure)

    @override
    def close(self) -> None:
        self.checks.close()
        super().close()

    def _start(self, answer: Answer, due: list[Check]) -> None:
        failure = "a verdict of the safety policy could not be applied"
        for check in due:
            self.spawn(answer, partial(self._ask, answer, check), failure)

    async def _read(self, answer: Answer, attempt: Row, window: Window) -> None:
        """Token classifiers read the next part of the answer."""
        decided, found = await self._entities(attempt, window)
        now = time.monotonic()
        blocking = [rule for one in decided if one.action is Action.BLOCK for rule in one.rules]
        if answer.current is attempt and blocking:
            answer.block(tuple(blocking), now)
            return
        answer.settle(attempt, window, found, now)
        self._continue(answer)

    async def _entities(self, attempt: Row, window: Window) -> tuple[list[Decided], list[Finding]]:
        """What is recorded of each classifier, and all that they found in ``window``."""
        context, guards = self._context, self._context.inspection.answer_readers
        checks = [self.checks.reading(one, attempt.completion_tokens) for one in guards]
        readings = await asyncio.gather(
            *(self._client.read(context, check, [window.text]) for check in checks)
        )
        decided = [one for _, one in readings]
        self.checks.decided += decided
        outcomes = [outcome for outcome, _ in readings if not isinstance(outcome, Failure)]
        return decided, [found for outcome in outcomes for found in outcome[0]]

    async def _ask(self, answer: Answer, check: Check) -> None:
        outcome, cost = await self._client.ask(self._context, check, self._turns)
        decided = self.checks.decide(check, outcome, cost)
        if decided is None:
            return
        if decided.action is Action.BLOCK and check.in_answer:
            answer.block(decided.rules, time.monotonic())
        elif decided.action is Action.BLOCK:
            raise self._blocked(decided)
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
        prepared = await self._upstream.admission.prepare_for(self._context, model)
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
