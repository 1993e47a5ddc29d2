"""What the safety layer of a mesh makes of a text."""

from dataclasses import dataclass

from sluice.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class SafetyFinding:
    """One place in a text that a rule has something to say about.

    Attributes:
        rule: such as "pii.iban".
        severity: "low", "medium", "high" or "critical".
        action: "allow", "flag", "route", "remove", "redact" or "block".
        start: first character, an offset into the text as it was given.
        end: one past the last character.
    """

    rule: str
    severity: str
    action: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetyCheck:
    """What would happen to a text.

    Attributes:
        normalized_text: after normalization; empty when it is too long to be looked at.
        text: what a model would see; empty when it is blocked.
        findings: by place.
        policy: version of the policy that decided.
        blocked: whether `generate` would fail with SafetyBlocked.
        model: where the policy sends it; empty: routing decides.
    """

    normalized_text: str
    text: str
    findings: list[SafetyFinding]
    policy: str
    blocked: bool
    model: str


def check_of(response: pb.CheckSafetyResponse) -> SafetyCheck:
    """The answer."""
    return SafetyCheck(
        response.normalized_text,
        response.text,
        [_finding(finding) for finding in response.findings],
        response.policy,
        response.blocked,
        response.model,
    )


def _finding(finding: pb.SafetyFinding) -> SafetyFinding:
    severity = pb.SafetySeverity.Name(finding.severity).removeprefix("SAFETY_SEVERITY_").lower()
    action = pb.SafetyAction.Name(finding.action).removeprefix("SAFETY_ACTION_").lower()
    return SafetyFinding(finding.rule, severity, action, finding.start, finding.end)
