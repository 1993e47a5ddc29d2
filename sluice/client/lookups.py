"""What the unary calls of a client return, as plain frozen data: models, token counts, safety checks, router health."""

from dataclasses import dataclass
from typing import Literal

from sluice.v1 import admin_pb2, inference_pb2, safety_pb2
from sluice.wire.enums import word_of


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be asked.

    Attributes:
        context_tokens: tokens that prompt and answer together may have.
        ready: whether a worker that serves it is alive now.
        slots: rows that its workers compute at once.
        running: rows in its workers now.
        queued: tasks that wait for a worker now.
    """

    name: str
    tier: str
    context_tokens: int
    ready: bool
    slots: int
    running: int
    queued: int


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Tokens of a prompt (template included), of the whole context, and the model whose tokenizer counted."""

    token_count: int
    context_tokens: int
    model: str


def models_of(response: inference_pb2.ListModelsResponse) -> list[Model]:
    """The models, in the order of the configuration."""
    return [
        Model(m.name, m.tier, m.context_tokens, m.ready, m.slots, m.running, m.queued)
        for m in response.models
    ]


def count_of(response: inference_pb2.CountTokensResponse) -> TokenCount:
    """The count."""
    return TokenCount(response.token_count, response.context_tokens, response.model)


@dataclass(frozen=True, slots=True)
class SafetyFinding:
    """One place in a text that a rule matched.

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


def dry_run_of(response: safety_pb2.GetDryRunResponse) -> SafetyDryRun:
    """The counts."""
    moves = [
        SafetyMove(move.rule, _action(move.now), _action(move.then), move.count)
        for move in response.moves
    ]
    return SafetyDryRun(response.policy, response.texts, response.changed, moves)


def check_of(response: safety_pb2.CheckTextResponse) -> SafetyCheck:
    """The answer."""
    return SafetyCheck(
        response.normalized_text,
        response.text,
        [_finding(finding) for finding in response.findings],
        response.policy,
        response.blocked,
        response.model,
    )


def _finding(finding: safety_pb2.SafetyFinding) -> SafetyFinding:
    severity = word_of(safety_pb2.SafetySeverity, finding.severity)
    return SafetyFinding(
        finding.rule, severity, _action(finding.action), finding.start, finding.end
    )


def _action(action: "safety_pb2.SafetyAction.ValueType") -> str:
    name = word_of(safety_pb2.SafetyAction, action)
    return "none" if name == "unspecified" else name


DriftState = Literal["unspecified", "gathering", "stable", "drifted"]
"""`gathering`: too few rows to tell."""


@dataclass(frozen=True, slots=True)
class InputDrift:
    """The gains that a head predicted lately, against those of its held-out outcomes.

    Attributes:
        rows: predictions that were looked at.
        stability_index: population stability index; None: too few rows.
        limit: they have shifted when the index is above it.
    """

    state: DriftState
    rows: int
    stability_index: float | None
    limit: float


@dataclass(frozen=True, slots=True)
class AccuracyDrift:
    """The chances that a head predicted lately, against what came of them.

    Attributes:
        rows: outcomes that were looked at.
        bias: mean of outcome less prediction, below 0 where the router is too optimistic; None: no outcomes.
        half_width: what the bias may be by chance.
        brier: mean squared difference; None: no outcomes.
    """

    state: DriftState
    rows: int
    bias: float | None
    half_width: float
    brier: float | None


@dataclass(frozen=True, slots=True)
class RouterHealth:
    """One head of a learned router.

    Attributes:
        policy: key of the policy that uses it, such as "routing".
        version: of its artefact.
        head: "prompt", or "cascade" for one that judges answers.
    """

    policy: str
    version: str
    head: str
    inputs: InputDrift
    accuracy: AccuracyDrift


def routers_of(response: admin_pb2.GetRouterHealthResponse) -> list[RouterHealth]:
    """Each head in use."""
    return [
        RouterHealth(
            one.policy,
            one.version,
            word_of(admin_pb2.RouterHead, one.head),
            _inputs(one.inputs),
            _accuracy(one.accuracy),
        )
        for one in response.routers
    ]


def _inputs(inputs: admin_pb2.InputDrift) -> InputDrift:
    index = inputs.stability_index if inputs.HasField("stability_index") else None
    return InputDrift(_state(inputs.state), inputs.rows, index, inputs.limit)


def _accuracy(accuracy: admin_pb2.AccuracyDrift) -> AccuracyDrift:
    known = accuracy.HasField("bias")
    return AccuracyDrift(
        _state(accuracy.state),
        accuracy.rows,
        accuracy.bias if known else None,
        accuracy.half_width,
        accuracy.brier if known else None,
    )


def _state(state: "admin_pb2.DriftState.ValueType") -> DriftState:
    words: dict[int, DriftState] = {
        admin_pb2.DRIFT_STATE_GATHERING: "gathering",
        admin_pb2.DRIFT_STATE_STABLE: "stable",
        admin_pb2.DRIFT_STATE_DRIFTED: "drifted",
    }
    return words.get(state, "unspecified")
