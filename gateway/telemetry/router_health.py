"""How a head of a learned router does, in the forms in which it is told: labels, a line of the log, a message."""

from collections.abc import Iterator
from typing import Any

from opentelemetry.util.types import AttributeValue

from gateway.routing.learned.monitor import Health, Signal, State
from gateway.routing.scores import HeadId
from sluice.telemetry import names
from sluice.v1.admin_pb2 import AccuracyDrift, DriftState, InputDrift, RouterHealth


def attributes(by: HeadId) -> dict[str, AttributeValue]:
    """Labels of metrics."""
    return {
        names.ROUTER_POLICY: by.policy,
        names.ROUTER_VERSION: by.version,
        names.ROUTER_HEAD: by.head,
    }


def fields(by: HeadId, health: Health, signal: Signal) -> Iterator[tuple[str, Any]]:
    """What a line of the log says of a drift of ``signal``."""
    yield from (("policy", by.policy), ("version", by.version), ("head", by.head))
    yield "signal", signal.value
    inputs, found = health.inputs, health.outcomes.found
    if signal is Signal.INPUTS and inputs.index is not None:
        yield from (("index", f"{inputs.index:.3f}"), ("limit", f"{inputs.limit:.3f}"))
        yield "rows", inputs.rows
    elif found is not None:
        yield from (("bias", f"{found.bias:+.3f}"), ("half_width", f"{found.half_width:.3f}"))
        yield "rows", found.rows


def described(by: HeadId, health: Health) -> RouterHealth:
    """What callers of the API see."""
    inputs, outcomes = health.inputs, health.outcomes
    accuracy = AccuracyDrift(state=_state(outcomes.state), rows=outcomes.rows)
    if outcomes.found is not None:
        accuracy.bias = outcomes.found.bias
        accuracy.half_width = outcomes.found.half_width
        accuracy.brier = outcomes.found.brier
    return RouterHealth(
        policy=by.policy,
        version=by.version,
        head=by.head,
        inputs=InputDrift(
            state=_state(inputs.state),
            rows=inputs.rows,
            stability_index=inputs.index,
            limit=inputs.limit,
        ),
        accuracy=accuracy,
    )


def _state(state: State) -> "DriftState.ValueType":
    return DriftState.Value(f"DRIFT_STATE_{state.name}")
