"""What the safety layer made of one text, and what a policy under trial would make of all, as the service answers."""

from gateway.admission.pipeline import SafetyOutcome
from gateway.safety.actions import Action
from gateway.safety.dry_run import DryRun
from gateway.safety.inspector import PromptFinding
from sluice.v1.inference_pb2 import (
    CheckSafetyResponse,
    GetSafetyDryRunResponse,
    SafetyAction,
    SafetyFinding,
    SafetyMove,
    SafetySeverity,
)


def safety_answer(safety: SafetyOutcome) -> CheckSafetyResponse:
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


def dry_run_answer(counts: DryRun) -> GetSafetyDryRunResponse:
    """The counts of the policy under trial."""
    moves = [
        SafetyMove(rule=rule, now=_action(now), then=_action(then), count=count)
        for (rule, now, then), count in counts.moves.most_common()
    ]
    return GetSafetyDryRunResponse(
        policy=counts.policy, texts=counts.texts, changed=counts.changed, moves=moves
    )


def _action(action: Action | None) -> "SafetyAction.ValueType":
    name = "UNSPECIFIED" if action is None else action.name
    return SafetyAction.Value(f"SAFETY_ACTION_{name}")


def _finding(found: PromptFinding) -> SafetyFinding:
    return SafetyFinding(
        rule=found.rule,
        severity=SafetySeverity.Value(f"SAFETY_SEVERITY_{found.severity.name}"),
        action=_action(found.action),
        start=found.start,
        end=found.end,
    )
