"""What the safety layer made of one text, as `CheckSafety` answers."""

from gateway.admission import Safety
from gateway.safety.inspector import Found
from sluice.v1.inference_pb2 import (
    CheckSafetyResponse,
    SafetyAction,
    SafetyFinding,
    SafetySeverity,
)


def safety_answer(safety: Safety) -> CheckSafetyResponse:
    """The answer about the only text of ``safety``."""
    (inspected,) = safety.inspected
    blocked = bool(safety.verdict.blocked)
    return CheckSafetyResponse(
        normalized_text=inspected.normalized,
        text="" if blocked else inspected.text,
        findings=[_finding(found) for found in inspected.found],
        policy=safety.policy.version,
        blocked=blocked,
        model=safety.governed.model if safety.governed else "",
    )


def _finding(found: Found) -> SafetyFinding:
    return SafetyFinding(
        rule=found.rule,
        severity=SafetySeverity.Value(f"SAFETY_SEVERITY_{found.severity.name}"),
        action=SafetyAction.Value(f"SAFETY_ACTION_{found.action.name}"),
        start=found.start,
        end=found.end,
    )
