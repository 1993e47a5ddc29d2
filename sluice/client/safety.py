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


@dataclass(frozen=True, slots=True)
class SafetyMove:
    """Findings that the policy under trial treats otherwise.

    Attributes:
        rule: such as "pii.iban".
        now: the action in force; "none" where only the policy under trial finds it.
        then: its action; "none" where it does not find it.
        count: how many there were.
    """

    rule: str
    now: str
    then: str
    count: int


@dataclass(frozen=True, slots=True)
class SafetyDryRun:
    """What one gateway has counted.

    Attributes:
        policy: version of the policy under trial.
        texts: of prompts and answers, that it was tried on.
        changed: how many of them would have come out otherwise, or not at all.
        moves: where the two policies differ, most frequent first.
    """

    policy: str
    texts: int
    changed: int
    moves: list[SafetyMove]


def dry_run_of(response: pb.GetSafetyDryRunResponse) -> SafetyDryRun:
    """The counts."""
    moves = [
        SafetyMove(move.rule, _action(move.now), _action(move.then), move.count)
        for move in response.moves
    ]
    return SafetyDryRun(response.policy, response.texts, response.changed, moves)


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
    return SafetyFinding(
        finding.rule, severity, _action(finding.action), finding.start, finding.end
    )


def _action(action: "pb.SafetyAction.ValueType") -> str:
    name = pb.SafetyAction.Name(action).removeprefix("SAFETY_ACTION_").lower()
    return "none" if name == "unspecified" else name
