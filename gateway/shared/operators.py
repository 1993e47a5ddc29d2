"""What operators ask of all gateways: each answers for itself, and the one that was asked makes one answer of it."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Final, TypeVar

from gateway.admission.policies import InForce
from gateway.records.store import RecordStore
from gateway.safety.actions import Action
from gateway.shared.peers import Answer as PeerAnswer
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

    @property
    def answers(self) -> Mapping[str, PeerAnswer]:
        """What this gateway answers, by the field of `GatewayQuestion` that asks."""
        return {
            "running": self._running_here,
            "cancel": self._cancel_here,
            "forget": self._forget_here,
            "dry_run": self._dry_run_here,
            "router_health": self._router_health_here,
        }

    # The requests that run.

    async def requests(self, wanted: pb.ListRequestsRequest) -> pb.ListRequestsResponse:
        """Those that ``wanted`` names, of all gateways, the oldest first."""
        answers, silent = await self.shared.peers.ask_all(GatewayQuestion(running=wanted))
        listed = pb.ListRequestsResponse(silent_gateways=silent)
        for one in answers:
            listed.MergeFrom(one.running)
        listed.requests.sort(key=lambda one: ms_of(one.age), reverse=True)
        del listed.requests[wanted.limit :]
        return listed

    async def _running_here(self, wanted: pb.ListRequestsRequest) -> GatewayAnswer:
        now, gateway = time.monotonic(), self.shared.peers.gateway_id
        streams = [
            stream
            for stream in self.registry
            if wanted.tenant in ("", stream.request.tenant)
            and wanted.model in ("", stream.current.model)
        ]
        oldest = nlargest(wanted.limit, streams, key=lambda one: _age_s(one, now))
        listed = pb.ListRequestsResponse(
            requests=[_described(stream, gateway, now) for stream in oldest],
            counts=_counts(streams, now),
            gateways=[gateway],
        )
        return GatewayAnswer(running=listed)

    async def cancel(self, wanted: pb.CancelRequestsRequest) -> pb.CancelRequestsResponse:
        """Cancels those that ``wanted`` names, at all gateways."""
        answers, silent = await self.shared.peers.ask_all(GatewayQuestion(cancel=wanted))
        done = pb.CancelRequestsResponse(silent_gateways=silent)
        for one in answers:
            done.MergeFrom(one.cancelled)
        return done

    async def _cancel_here(self, wanted: pb.CancelRequestsRequest) -> GatewayAnswer:
        names = set(wanted.request_ids)
        streams = [
            stream
            for stream in self.registry
            if stream.request_id in names
            or (wanted.tenant and stream.request.tenant == wanted.tenant)
        ]
        for stream in streams:
            stream.fail(Cancelled(CANCELLED))
        done = pb.CancelRequestsResponse(request_ids=[stream.request_id for stream in streams])
        return GatewayAnswer(cancelled=done)

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
        question = GatewayQuestion(forget=ForgetQuestion(tenant=tenant))
        _, silent = await self.shared.peers.ask_all(question, 2 * WRITE_S)
        await self.shared.idempotency_keys.purge(f"{tenant}.*")
        uncleared = await self.shared.answers.clear(pb.ClearAnswersRequest(tenant=tenant))
        done = await self.store.forget(tenant)
        done.api_keys, done.cancelled = len(keys), len(cancelled.request_ids)
        done.unreached_gateways.extend(sorted({*silent, *uncleared}))
        return done

    async def _forget_here(self, forgotten: ForgetQuestion) -> GatewayAnswer:
        """Drops what is in memory of a tenant, and writes what is queued."""
        self.registry.drop_replays(forgotten.tenant)
        await self.store.flush(WRITE_S)
        return GatewayAnswer()

    # What was counted of policies and routers.

    async def dry_run(self) -> GetDryRunResponse:
        """The counts of the policy under trial, of all gateways that try it; raises NoDryRun."""
        if self.in_force.policies.inspector.dry_run is None:
            raise NoDryRun("no policy is under trial; name one with safety.dry_run")
        answers, _ = await self.shared.peers.ask_all(GatewayQuestion(dry_run=DryRunQuestion()))
        return sum_dry_runs([one.dry_run for one in answers])

    async def _dry_run_here(self, _: DryRunQuestion) -> GatewayAnswer:
        counts = self.in_force.policies.inspector.dry_run
        if counts is None:
            return GatewayAnswer()
        moves = [
            SafetyMove(rule=rule, now=_action(now), then=_action(then), count=count)
            for (rule, now, then), count in counts.moves.items()
        ]
        counted = GetDryRunResponse(
            policy=counts.policy,
            texts=counts.texts,
            changed=counts.changed,
            moves=moves,
            gateways=[self.shared.peers.gateway_id],
        )
        return GatewayAnswer(dry_run=counted)

    async def router_health(self) -> pb.GetRouterHealthResponse:
        """The health of the learned routers, by the requests of all gateways."""
        question = GatewayQuestion(router_health=RouterHealthQuestion())
        answers, _ = await self.shared.peers.ask_all(question)
        return sum_router_health([one.router_health for one in answers])

    async def _router_health_here(self, _: RouterHealthQuestion) -> GatewayAnswer:
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


def sum_dry_runs(answers: Sequence[GetDryRunResponse]) -> GetDryRunResponse:
    """The counts of all that try the policy of the first."""
    same = [one for one in answers if one.policy == answers[0].policy]
    moves: Counter[tuple[str, int, int]] = Counter()
    for one in same:
        moves.update({(move.rule, move.now, move.then): move.count for move in one.moves})
    return GetDryRunResponse(
        policy=answers[0].policy,
        texts=sum(one.texts for one in same),
        changed=sum(one.changed for one in same),
        moves=[
            SafetyMove(rule=rule, now=now, then=then, count=count)  # type: ignore[arg-type]
            for (rule, now, then), count in moves.most_common()
        ],
        gateways=[name for one in same for name in one.gateways],
    )


def sum_router_health(answers: Sequence[pb.GetRouterHealthResponse]) -> pb.GetRouterHealthResponse:
    """The health of each head of the first: sums of rows, means weighted by rows, drifted if one gateway is."""
    total = pb.GetRouterHealthResponse()
    total.CopyFrom(answers[0])
    every = [head for one in answers for head in one.routers]
    for head in total.routers:
        same = [one for one in every if _name(one) == _name(head)]
        _sum(head.inputs, [one.inputs for one in same], "stability_index")
        _sum(head.accuracy, [one.accuracy for one in same], "bias", "half_width", "brier")
    total.gateways[:] = [name for one in answers for name in one.gateways]
    return total


def _name(head: pb.RouterHealth) -> tuple[str, str, int]:
    return head.policy, head.version, head.head


Drift = TypeVar("Drift", pb.InputDrift, pb.AccuracyDrift)


def _sum(total: Drift, parts: Sequence[Drift], judged: str, *others: str) -> None:
    """Makes ``total`` the sum of ``parts``; they have a measure where they have the one ``judged``."""
    states = {part.state for part in parts}
    total.state = next((one for one in _WORST_FIRST if one in states), total.state)
    total.rows = sum(part.rows for part in parts)
    known = [part for part in parts if part.HasField(judged)]  # type: ignore[arg-type]
    rows = sum(part.rows for part in known)
    for name in (judged, *others) if rows else ():
        setattr(total, name, sum(getattr(part, name) * part.rows for part in known) / rows)


_WORST_FIRST: Final = (pb.DRIFT_STATE_DRIFTED, pb.DRIFT_STATE_STABLE)
