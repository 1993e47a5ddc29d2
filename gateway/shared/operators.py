"""What operators ask of all gateways: each answers for itself, and the one that was asked makes one answer of it."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Final

from gateway.admission.policies import InForce
from gateway.records.store import RecordStore
from gateway.safety.actions import Action
from gateway.shared.peers import ASK_S
from gateway.shared.state import SharedState
from gateway.streaming.registry import Registry
from gateway.streaming.row_result import RowResult
from gateway.telemetry.drift import DriftMonitor
from sluice.errors import Cancelled, NoDryRun
from sluice.internal.v1.gateway_pb2 import (
    DryRunQuestion,
    ForgetQuestion,
    GatewayAnswer,
    GatewayQuestion,
    RouterHealthQuestion,
)
from sluice.internal.v1.identity_pb2 import ApiKeyRecord
from sluice.v1 import admin_pb2 as pb
from sluice.v1.inference_pb2 import Priority
from sluice.v1.safety_pb2 import GetDryRunResponse, SafetyAction, SafetyMove
from sluice.wire.clock import duration, ms_of
from sluice.wire.enums import value_of

LIST_MAX: Final = 1000
"""Requests in one answer: a message on NATS has 1 MiB."""
CANCELLED: Final = "an operator cancelled the request"
WRITE_S: Final = 2.0
"""How long records that are queued may take to be written before they are deleted, seconds."""


@dataclass(frozen=True)
class Operators:
    """The answers of this gateway, and of all together.

    Attributes:
        in_force: its inspector has the counts of the policy under trial.
    """

    shared: SharedState
    in_force: InForce
    registry: Registry
    store: RecordStore
    drift: DriftMonitor

    async def _ask(
        self, question: GatewayQuestion, bound_s: float = ASK_S
    ) -> tuple[list[GatewayAnswer], list[str]]:
        """The answers of the others, and who gave none; one of an earlier release does not know the question."""
        answers = await self.shared.peers.ask_all(question, bound_s)
        known = {name: one for name, one in answers.items() if one is not None and not one.problem}
        return [*known.values()], sorted(answers.keys() - known.keys())

    # The requests that run.

    async def requests(self, wanted: pb.ListRequestsRequest) -> pb.ListRequestsResponse:
        """Those that ``wanted`` names, of all gateways, the oldest first."""
        answers, silent = await self._ask(GatewayQuestion(running=wanted))
        found = [self._requests_here(wanted), *(one.running for one in answers)]
        every = (request for one in found for request in one.requests)
        return pb.ListRequestsResponse(
            requests=nlargest(wanted.limit, every, key=lambda one: ms_of(one.age)),
            counts=[count for one in found for count in one.counts],
            gateways=[name for one in found for name in one.gateways],
            silent_gateways=silent,
        )

    async def answer_requests(self, question: GatewayQuestion) -> GatewayAnswer:
        """Which requests run here?"""
        return GatewayAnswer(running=self._requests_here(question.running))

    def _requests_here(self, wanted: pb.ListRequestsRequest) -> pb.ListRequestsResponse:
        now, gateway = time.monotonic(), self.shared.peers.gateway_id
        streams = [
            stream
            for stream in self.registry
            if wanted.tenant in ("", stream.request.tenant)
            and wanted.model in ("", stream.current.model)
        ]
        oldest = nlargest(wanted.limit, streams, key=lambda one: _age_s(one, now))
        return pb.ListRequestsResponse(
            requests=[_described(stream, gateway, now) for stream in oldest],
            counts=_counts(streams, now),
            gateways=[gateway],
        )

    async def cancel(self, wanted: pb.CancelRequestsRequest) -> pb.CancelRequestsResponse:
        """Cancels those that ``wanted`` names, at all gateways."""
        answers, silent = await self._ask(GatewayQuestion(cancel=wanted))
        others = [name for one in answers for name in one.cancelled.request_ids]
        names = [*self._cancel_here(wanted), *others]
        return pb.CancelRequestsResponse(request_ids=names, silent_gateways=silent)

    async def answer_cancel(self, question: GatewayQuestion) -> GatewayAnswer:
        """Cancel these requests."""
        cancelled = pb.CancelRequestsResponse(request_ids=self._cancel_here(question.cancel))
        return GatewayAnswer(cancelled=cancelled)

    def _cancel_here(self, wanted: pb.CancelRequestsRequest) -> list[str]:
        names = set(wanted.request_ids)
        streams = [
            stream
            for stream in self.registry
            if stream.request_id in names
            or (wanted.tenant and stream.request.tenant == wanted.tenant)
        ]
        for stream in streams:
            stream.fail(Cancelled(CANCELLED))
        return [stream.request_id for stream in streams]

    # What is kept of a tenant.

    async def forget(self, tenant: str) -> pb.ForgetTenantResponse:
        """Deletes it; API keys first, so that nothing new is created meanwhile. Returns what was deleted.

        Raises:
            TransportUnavailable: not all is deleted; it may be called again.
        """
        api_keys = self.shared.api_keys
        records = api_keys.read_all(ApiKeyRecord)
        keys = [key async for key, record in records if record.tenant == tenant]
        for key in keys:
            await api_keys.purge(key)
        cancelled = await self.cancel(pb.CancelRequestsRequest(tenant=tenant))
        await self._forget_here(tenant)
        question = GatewayQuestion(forget=ForgetQuestion(tenant=tenant))
        _, silent = await self._ask(question, 2 * WRITE_S)
        await self.shared.idempotency_keys.purge(f"{tenant}.*")
        uncleared = await self.shared.answers.clear(pb.ClearAnswersRequest(tenant=tenant))
        stored = await self.store.forget(tenant)
        return pb.ForgetTenantResponse(
            api_keys=len(keys),
            cancelled=len(cancelled.request_ids),
            records=stored.records,
            audit_entries=stored.audit_entries,
            outcomes=stored.outcomes,
            dead_letters=stored.dead_letters,
            unreached_gateways=sorted({*silent, *uncleared}),
            kept=[stored.kept] if stored.kept else [],
        )

    async def answer_forget(self, question: GatewayQuestion) -> GatewayAnswer:
        """Drop what is in memory of a tenant, and write what is queued."""
        await self._forget_here(question.forget.tenant)
        return GatewayAnswer()

    async def _forget_here(self, tenant: str) -> None:
        self.registry.drop_replays(tenant)
        await self.store.flush(WRITE_S)

    # What was counted of policies and routers.

    async def dry_run(self) -> GetDryRunResponse:
        """The counts of the policy under trial, of all gateways that try it; raises NoDryRun."""
        own = self._dry_run_here()
        if own is None:
            raise NoDryRun("no policy is under trial; name one with safety.dry_run")
        others, _ = await self._ask(GatewayQuestion(dry_run=DryRunQuestion()))
        return sum_dry_runs(own, [one.dry_run for one in others])

    async def answer_dry_run(self, _: GatewayQuestion) -> GatewayAnswer:
        """What has the dry run counted here?"""
        return GatewayAnswer(dry_run=self._dry_run_here())

    def _dry_run_here(self) -> GetDryRunResponse | None:
        counts = self.in_force.policies.inspector.dry_run
        if counts is None:
            return None
        moves = [
            SafetyMove(rule=rule, now=_action(now), then=_action(then), count=count)
            for (rule, now, then), count in counts.moves.most_common()
        ]
        return GetDryRunResponse(
            policy=counts.policy,
            texts=counts.texts,
            changed=counts.changed,
            moves=moves,
            gateways=[self.shared.peers.gateway_id],
        )

    async def router_health(self) -> pb.GetRouterHealthResponse:
        """The health of the learned routers, by the requests of all gateways."""
        others, _ = await self._ask(GatewayQuestion(router_health=RouterHealthQuestion()))
        return sum_router_health(self.drift.health(), [one.router_health for one in others])

    async def answer_router_health(self, _: GatewayQuestion) -> GatewayAnswer:
        """How are the learned routers, by the requests of this gateway?"""
        return GatewayAnswer(router_health=self.drift.health())


def _age_s(stream: RowResult, now: float) -> float:
    return now - stream.request.arrived_at


def _described(stream: RowResult, gateway: str, now: float) -> pb.RunningRequest:
    current = stream.current
    return pb.RunningRequest(
        request_id=stream.request_id,
        tenant=stream.request.tenant,
        priority=value_of(Priority, stream.request.priority_class),
        model=current.model,
        state=value_of(pb.RequestState, stream.state.name),
        age=duration(_age_s(stream, now) * 1e3),
        remaining=duration(max(0.0, stream.request.deadline - now) * 1e3),
        prompt_tokens=current.prompt_tokens,
        completion_tokens=current.completion_tokens,
        gateway=gateway,
    )


def _counts(streams: Iterable[RowResult], now: float) -> list[pb.RunningCount]:
    groups: defaultdict[tuple[str, str, str], list[RowResult]] = defaultdict(list)
    for stream in streams:
        request = stream.request
        groups[request.tenant, stream.current.model, request.priority_class].append(stream)
    return [
        pb.RunningCount(
            tenant=tenant,
            model=model,
            priority=value_of(Priority, priority_class),
            requests=len(group),
            waiting=sum(not one.current.completion_tokens for one in group),
            completion_tokens=sum(one.current.completion_tokens for one in group),
            oldest_age=duration(max(_age_s(one, now) for one in group) * 1e3),
        )
        for (tenant, model, priority_class), group in groups.items()
    ]


def _action(action: Action | None) -> "SafetyAction.ValueType":
    return value_of(SafetyAction, "unspecified" if action is None else action.name)


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
