"""What several gateways have counted, as one answer."""

from collections import Counter
from collections.abc import Iterable, Sequence

from sluice.v1 import admin_pb2 as pb
from sluice.v1.safety_pb2 import GetDryRunResponse, SafetyMove


def sum_dry_runs(own: GetDryRunResponse, others: Iterable[GetDryRunResponse]) -> GetDryRunResponse:
    """The counts of all that try the policy of ``own``."""
    same = [own, *(one for one in others if one.policy == own.policy)]
    moves: Counter[tuple[str, int, int]] = Counter()
    for one in same:
        moves.update({(move.rule, move.now, move.then): move.count for move in one.moves})
    return GetDryRunResponse(
        policy=own.policy,
        texts=sum(one.texts for one in same),
        changed=sum(one.changed for one in same),
        moves=[
            SafetyMove(rule=rule, now=now, then=then, count=count)  # type: ignore[arg-type]
            for (rule, now, then), count in moves.most_common()
        ],
        gateways=[name for one in same for name in one.gateways],
    )


def sum_router_health(
    own: pb.GetRouterHealthResponse, others: Iterable[pb.GetRouterHealthResponse]
) -> pb.GetRouterHealthResponse:
    """The health of each head of ``own``: sums of rows, means weighted by rows, drifted if one gateway is."""
    every = [own, *others]
    routers = []
    for head in own.routers:
        same = [one for each in every for one in each.routers if _name(one) == _name(head)]
        summed = pb.RouterHealth(policy=head.policy, version=head.version, head=head.head)
        summed.inputs.CopyFrom(_inputs([one.inputs for one in same]))
        summed.accuracy.CopyFrom(_accuracy([one.accuracy for one in same]))
        routers.append(summed)
    return pb.GetRouterHealthResponse(
        routers=routers,
        gateway=own.gateway,
        gateways=[name for one in every for name in one.gateways],
    )


def _name(head: pb.RouterHealth) -> tuple[str, str, int]:
    return head.policy, head.version, head.head


def _inputs(parts: Sequence[pb.InputDrift]) -> pb.InputDrift:
    judged = [(one.stability_index, one.rows) for one in parts if one.HasField("stability_index")]
    return pb.InputDrift(
        state=_state([one.state for one in parts]),
        rows=sum(one.rows for one in parts),
        stability_index=_mean(judged) if judged else None,
        limit=_mean([(one.limit, one.rows) for one in parts]),
    )


def _accuracy(parts: Sequence[pb.AccuracyDrift]) -> pb.AccuracyDrift:
    judged = [one for one in parts if one.HasField("bias")]
    return pb.AccuracyDrift(
        state=_state([one.state for one in parts]),
        rows=sum(one.rows for one in parts),
        bias=_mean([(one.bias, one.rows) for one in judged]) if judged else None,
        half_width=_mean([(one.half_width, one.rows) for one in judged]),
        brier=_mean([(one.brier, one.rows) for one in judged]),
    )


def _mean(values: Sequence[tuple[float, int]]) -> float:
    """Of values with their numbers of rows."""
    rows = sum(count for _, count in values)
    if len(values) == 1 or not rows:  # exactly what one gateway alone has
        return values[0][0] if values else 0.0
    return sum(value * count for value, count in values) / rows


def _state(states: Sequence["pb.DriftState.ValueType"]) -> "pb.DriftState.ValueType":
    for state in (pb.DRIFT_STATE_DRIFTED, pb.DRIFT_STATE_STABLE):
        if state in states:
            return state
    return pb.DRIFT_STATE_GATHERING
