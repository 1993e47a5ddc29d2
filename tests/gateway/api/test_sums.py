"""What several gateways have counted, as one answer."""

from gateway.api.admin_service import sum_router_health
from gateway.api.safety_service import sum_dry_runs
from sluice.v1.admin_pb2 import (
    DRIFT_STATE_DRIFTED,
    DRIFT_STATE_GATHERING,
    DRIFT_STATE_STABLE,
    ROUTER_HEAD_PROMPT,
    AccuracyDrift,
    DriftState,
    GetRouterHealthResponse,
    InputDrift,
    RouterHealth,
)
from sluice.v1.safety_pb2 import (
    SAFETY_ACTION_BLOCK,
    SAFETY_ACTION_FLAG,
    GetDryRunResponse,
    SafetyMove,
)


def dry_run(gateway: str, policy: str, *moves: tuple[str, int]) -> GetDryRunResponse:
    return GetDryRunResponse(
        policy=policy,
        texts=10,
        changed=2,
        moves=[
            SafetyMove(rule=rule, now=SAFETY_ACTION_FLAG, then=SAFETY_ACTION_BLOCK, count=count)
            for rule, count in moves
        ],
        gateways=[gateway],
    )


def test_dry_runs_of_the_same_policy_add_up() -> None:
    own = dry_run("gw1", "p@1", ("pii.email", 1))
    same = dry_run("gw2", "p@1", ("pii.iban", 5), ("pii.email", 2))
    other = dry_run("gw3", "p@2", ("pii.email", 100))
    total = sum_dry_runs([own, same, other])
    assert (total.policy, total.texts, total.changed) == ("p@1", 20, 4)
    assert [(move.rule, move.count) for move in total.moves] == [("pii.iban", 5), ("pii.email", 3)]
    assert list(total.gateways) == ["gw1", "gw2"]


def health(
    gateway: str, rows: int, index: float | None, bias: float | None, state: "DriftState.ValueType"
) -> GetRouterHealthResponse:
    accuracy = AccuracyDrift(state=DRIFT_STATE_GATHERING, rows=0)
    if bias is not None:
        accuracy = AccuracyDrift(state=state, rows=rows, bias=bias, half_width=0.1, brier=0.2)
    inputs = InputDrift(state=state, rows=rows, stability_index=index, limit=0.25)
    head = RouterHealth(
        policy="routing", version="v", head=ROUTER_HEAD_PROMPT, inputs=inputs, accuracy=accuracy
    )
    return GetRouterHealthResponse(routers=[head], gateway=gateway, gateways=[gateway])


def test_rows_add_up_and_measures_are_means_by_rows() -> None:
    total = sum_router_health(
        [
            health("gw1", 100, 0.1, 0.3, DRIFT_STATE_STABLE),
            health("gw2", 300, 0.5, -0.1, DRIFT_STATE_DRIFTED),
            health("gw3", 5, None, None, DRIFT_STATE_GATHERING),
        ]
    )
    (head,) = total.routers
    assert (head.inputs.rows, head.inputs.state) == (405, DRIFT_STATE_DRIFTED)
    assert abs(head.inputs.stability_index - 0.4) < 1e-9
    assert (head.accuracy.rows, head.accuracy.state) == (400, DRIFT_STATE_DRIFTED)
    assert abs(head.accuracy.bias - 0.0) < 1e-9
    assert (total.gateway, list(total.gateways)) == ("gw1", ["gw1", "gw2", "gw3"])


def test_one_gateway_alone_says_what_it_has() -> None:
    own = health("gw1", 100, None, None, DRIFT_STATE_GATHERING)
    total = sum_router_health([own])
    assert not total.routers[0].inputs.HasField("stability_index")
    assert not total.routers[0].accuracy.HasField("bias")
