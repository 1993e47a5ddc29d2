"""``sluice.v1.SafetyService`` over grpc.aio: what the safety policies make of one text."""

import asyncio
from typing import Any, Final

from gateway.admission.calls import ClassLimiter
from gateway.admission.pipeline import Admission, AdmittedRequest, SafetyOutcome
from gateway.safety.actions import Action
from gateway.safety.inspector import PromptFinding
from gateway.shared.operators import Operators
from gateway.telemetry.request_log import untraced
from gateway.validation.conversation import USER, Conversation, Turn
from gateway.validation.requests import UNSTATED_CLASS, ValidRequest, check_labels
from sluice.v1 import safety_pb2 as pb
from sluice.v1.safety_pb2_grpc import SafetyServiceServicer
from sluice.wire.enums import value_of

ASIDE_FINDINGS: Final = 256
"""More are written beside the event loop: a text may have ten thousand."""
SAFETY_SERVICE: Final = pb.DESCRIPTOR.services_by_name["SafetyService"].full_name


class SafetyService(SafetyServiceServicer):
    """Answers from the policies in force."""

    def __init__(self, admission: Admission, limiter: ClassLimiter, operators: Operators) -> None:
        self._admission = admission
        self._limiter = limiter
        self._operators = operators

    async def CheckText(self, request: pb.CheckTextRequest, context: Any) -> pb.CheckTextResponse:
        """See the proto."""
        check_labels(request.labels)
        async with self._limiter.slot(UNSTATED_CLASS, context.caller.tenant):
            text = Conversation((Turn(USER, request.text),), raw=True)
            labels, timeout_s = dict(request.labels), context.guards_timeout_s
            asked = ValidRequest(text, context.caller, labels, timeout_s)
            about = AdmittedRequest(asked, untraced())
            safety = await self._admission.check(about)
            if len(safety.inspected[0].found) > ASIDE_FINDINGS:
                return await asyncio.to_thread(_checked, safety)
            return _checked(safety)

    async def GetDryRun(self, request: pb.GetDryRunRequest, context: Any) -> pb.GetDryRunResponse:
        """See the proto."""
        return await self._operators.dry_run()


def _checked(safety: SafetyOutcome) -> pb.CheckTextResponse:
    """The answer about the only text of ``safety``."""
    (inspected,) = safety.inspected
    blocked = bool(safety.verdict.blocked)
    return pb.CheckTextResponse(
        normalized_text=inspected.normalized,
        text="" if blocked else inspected.text,
        findings=[*map(_finding, inspected.found), *map(_failure, safety.entities.failed)],
        policy=safety.policy,
        blocked=blocked,
        model=safety.governed[0] if safety.governed else "",
    )


def _action(action: Action) -> "pb.SafetyAction.ValueType":
    return value_of(pb.SafetyAction, action.name)


def _failure(failed: tuple[str, Action]) -> pb.SafetyFinding:
    """A token classifier that gave no answer; it has no place in the text."""
    rule, action = failed
    return pb.SafetyFinding(rule=rule, action=_action(action))


def _finding(found: PromptFinding) -> pb.SafetyFinding:
    return pb.SafetyFinding(
        rule=found.rule,
        severity=value_of(pb.SafetySeverity, found.severity.name),
        action=_action(found.action),
        start=found.start,
        end=found.end,
    )
