"""How the learned routers of a gateway do."""

from dataclasses import dataclass
from typing import Literal

from sluice.v1 import admin_pb2 as pb

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


def routers_of(response: pb.GetRouterHealthResponse) -> list[RouterHealth]:
    """Each head in use."""
    return [
        RouterHealth(
            one.policy, one.version, one.head, _inputs(one.inputs), _accuracy(one.accuracy)
        )
        for one in response.routers
    ]


def _inputs(inputs: pb.InputDrift) -> InputDrift:
    index = inputs.stability_index if inputs.HasField("stability_index") else None
    return InputDrift(_state(inputs.state), inputs.rows, index, inputs.limit)


def _accuracy(accuracy: pb.AccuracyDrift) -> AccuracyDrift:
    known = accuracy.HasField("bias")
    return AccuracyDrift(
        _state(accuracy.state),
        accuracy.rows,
        accuracy.bias if known else None,
        accuracy.half_width,
        accuracy.brier if known else None,
    )


def _state(state: "pb.DriftState.ValueType") -> DriftState:
    words: dict[int, DriftState] = {
        pb.DRIFT_STATE_GATHERING: "gathering",
        pb.DRIFT_STATE_STABLE: "stable",
        pb.DRIFT_STATE_DRIFTED: "drifted",
    }
    return words.get(state, "unspecified")
