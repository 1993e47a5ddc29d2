"""Serves `sluice.v1.AdminService`: what runs, and what is recorded of requests.

A question about all gateways goes to each of them; the gateway that was called merges the answers.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from heapq import nlargest
from typing import Final, TypeVar

from google.protobuf.message import Message

from gateway.api.methods import GrpcCall, is_local
from gateway.records.store import RecordStore
from gateway.shared.peers import QueryHandler
from gateway.shared.state import SharedState
from gateway.streaming.model_run import ResultCollector
from gateway.streaming.registry import Registry
from gateway.telemetry.drift import DriftMonitor
from gateway.telemetry.request_record import audit_response
from sluice.errors import Cancelled, InvalidRequest, PermissionDenied, RequestUnknown, WorkerUnknown
from sluice.internal.v1.gateway_pb2 import (
    ForgetQuery,
    GatewayQuery,
    GatewayReply,
    RouterHealthQuery,
)
from sluice.internal.v1.identity_pb2 import ApiKeyRecord
from sluice.settings import Settings
from sluice.telemetry.catalog import METRICS
from sluice.telemetry.exchange import MetricsExchange
from sluice.v1 import admin_pb2 as pb
from sluice.v1.inference_pb2 import Priority
from sluice.wire.clock import duration, ms_of, timestamp, unix_ms
from sluice.wire.enums import value_of
from sluice.wire.subjects import is_token

LIST_MAX: Final = 1000
"""Requests in one answer: a message on NATS has 1 MiB."""
CANCELLED: Final = "an operator cancelled the request"
"""The message of the error of a request that an operator cancelled."""
WRITE_S: Final = 2.0
"""How long queued records may take to be written before they are deleted, in seconds."""
WORKER_CHARS_MAX: Final = 256
"""Longest name of a worker, in characters."""
DAY_S: Final = 86_400
"""Seconds of a day: clocks of callers may be ahead by time zones."""
_NAMES: Final = frozenset({"tenant", "tenants", "model", "request_id", "request_ids", "trace_id"})
"""Fields of requests that are names."""
ADMIN_SERVICE: Final = pb.DESCRIPTOR.services_by_name["AdminService"].full_name


@dataclass(frozen=True, eq=False)
class AdminService:
    """Answers operators and auditors, and tenants about themselves.

    Attributes:
        settings: Settings of the mesh.
        shared: What the gateways of the mesh share.
        registry: The live answers.
        store: Records, grades, audit entries and outcomes.
        drift: The drift of learned routers.
        metrics: Metrics of all processes.
    """

    settings: Settings
    shared: SharedState
    registry: Registry
    store: RecordStore
    drift: DriftMonitor
    metrics: MetricsExchange

    @property
    def answers(self) -> Mapping[str, QueryHandler]:
        """What answers questions of other gateways, by their field of `GatewayQuery`."""
        return {
            "running": self._running_here,
            "cancel": self._cancel_here,
            "forget": self._forget_here,
            "router_health": self._router_health_here,
        }

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: GrpcCall
    ) -> pb.ListRequestsResponse:
        """See the proto."""
        if request.limit > LIST_MAX:
            raise InvalidRequest.of("limit", f"must be at most {LIST_MAX}")
        _check(request)
        request.tenant = context.caller.readable_tenant or request.tenant
        answers, silent = await self.shared.peers.query_all(GatewayQuery(running=request))
        listed = pb.ListRequestsResponse(silent_gateways=silent)
        for answer in answers:
            listed.MergeFrom(answer.running)
        listed.requests.sort(key=lambda running: ms_of(running.age), reverse=True)
        del listed.requests[request.limit :]
        return listed

    async def _running_here(self, request: pb.ListRequestsRequest) -> GatewayReply:
        now, gateway = time.monotonic(), self.shared.peers.gateway_id
        streams = [
            stream
            for stream in self.registry
            if request.tenant in ("", stream.tenant) and request.model in ("", stream.current.model)
        ]
        oldest = nlargest(request.limit, streams, key=lambda stream: _age_s(stream, now))
        listed = pb.ListRequestsResponse(
            requests=[_described(stream, gateway, now) for stream in oldest],
            counts=_counts(streams, now),
            gateways=[gateway],
        )
        return GatewayReply(running=listed)

    async def ListTenants(
        self, request: pb.ListTenantsRequest, context: GrpcCall
    ) -> pb.ListTenantsResponse:
        """See the proto."""
        _check(request)
        tenant = context.caller.readable_tenant or request.tenant
        return self.shared.usage.listed(tenant, self.settings.currency)

    async def ForgetTenant(
        self, request: pb.ForgetTenantRequest, context: GrpcCall
    ) -> pb.ForgetTenantResponse:
        """See the proto."""
        _check(request, "tenant")
        # API keys first, so that nothing new is created meanwhile.
        tenant, api_keys = request.tenant, self.shared.api_keys
        records = api_keys.read_all(ApiKeyRecord)
        keys = [key async for key, record in records if record.tenant == tenant]
        for key in keys:
            await api_keys.purge(key)
        cancelled = await self._cancel(pb.CancelRequestsRequest(tenant=tenant))
        question = GatewayQuery(forget=ForgetQuery(tenant=tenant))
        _, silent = await self.shared.peers.query_all(question, 2 * WRITE_S)
        await self.shared.idempotency_keys.purge(f"{tenant}.*")
        uncleared = await self.shared.answers.clear(pb.ClearAnswersRequest(tenant=tenant))
        response = await self.store.forget(tenant)
        response.api_keys, response.cancelled = len(keys), len(cancelled.request_ids)
        response.unreached_gateways.extend(sorted({*silent, *uncleared}))
        return response

    async def _forget_here(self, question: ForgetQuery) -> GatewayReply:
        """Drop what is in memory of a tenant, and write what is queued."""
        self.registry.drop_replays(question.tenant)
        await self.store.flush(WRITE_S)
        return GatewayReply()

    async def CancelRequests(
        self, request: pb.CancelRequestsRequest, context: GrpcCall
    ) -> pb.CancelRequestsResponse:
        """See the proto."""
        if bool(request.request_ids) == bool(request.tenant):
            raise InvalidRequest.of("request_ids", "name requests, or a tenant")
        _check(request)
        cancelled = await self._cancel(request)
        if request.request_ids and not cancelled.request_ids:
            raise RequestUnknown(f"{', '.join(request.request_ids)}: no such request runs now")
        return cancelled

    async def _cancel(self, request: pb.CancelRequestsRequest) -> pb.CancelRequestsResponse:
        """Cancel the requests that `request` names, at all gateways."""
        answers, silent = await self.shared.peers.query_all(GatewayQuery(cancel=request))
        response = pb.CancelRequestsResponse(silent_gateways=silent)
        for answer in answers:
            response.MergeFrom(answer.cancelled)
        return response

    async def _cancel_here(self, request: pb.CancelRequestsRequest) -> GatewayReply:
        names = set(request.request_ids)
        streams = [
            stream
            for stream in self.registry
            if stream.request_id in names or (request.tenant and stream.tenant == request.tenant)
        ]
        for stream in streams:
            stream.fail(Cancelled(CANCELLED))
        request_ids = [stream.request_id for stream in streams]
        return GatewayReply(cancelled=pb.CancelRequestsResponse(request_ids=request_ids))

    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: GrpcCall
    ) -> pb.DrainWorkerResponse:
        """See the proto."""
        _check(request)
        if len(request.worker) > WORKER_CHARS_MAX:
            raise InvalidRequest.of("worker", f"must have at most {WORKER_CHARS_MAX} characters")
        worker = (request.model, request.worker)
        live: dict[tuple[str, str], bool] = {}

        def is_known(processes: list[pb.ProcessMetrics]) -> bool:
            live.update(_live_workers(processes))
            return request.undo or worker in live

        await self.metrics.read_all(("sluice.worker.live",), is_known)
        # A worker that left the configuration can still be taken off the list of drained ones.
        if not request.undo and worker not in live:
            names = ", ".join(" ".join(name) for name in sorted(live)) or "none"
            raise WorkerUnknown(
                f"no batcher knows a worker {request.worker!r} of {request.model!r}; there are: {names}"
            )
        change = self.shared.drains.change
        record = await change(request.model, request.worker, drained=not request.undo)
        drained = {(entry.model, entry.worker) for entry in record.workers}
        others = {name for name, reached in live.items() if reached and name[0] == request.model}
        return pb.DrainWorkerResponse(
            others=len(others - drained - {worker}),
            drained=[" ".join(name) for name in sorted(drained)],
        )

    async def ReadMetrics(
        self, request: pb.ReadMetricsRequest, context: GrpcCall
    ) -> pb.ReadMetricsResponse:
        """See the proto."""
        if len(request.names) > len(METRICS):
            raise InvalidRequest.of("names", f"there are {len(METRICS)} metrics")
        unknown = sorted(set(request.names) - METRICS.keys())
        if unknown:
            raise InvalidRequest.of("names", f"no metrics of the mesh: {', '.join(unknown)}")
        return pb.ReadMetricsResponse(processes=await self.metrics.read_all(request.names))

    async def GetRequestRecord(
        self, request: pb.GetRequestRecordRequest, context: GrpcCall
    ) -> pb.GetRequestRecordResponse:
        """See the proto."""
        if request.trace_id:
            _check(request, "trace_id")
            return await self.store.explain_trace(request.trace_id, context.caller.readable_tenant)
        _check(request, "request_id")
        return await self.store.explain(request.request_id, context.caller.readable_tenant)

    async def GetAuditEntry(
        self, request: pb.GetAuditEntryRequest, context: GrpcCall
    ) -> pb.GetAuditEntryResponse:
        """See the proto."""
        _check(request, "request_id")
        entry = await self.store.audit_entry(request.request_id, context.caller.readable_tenant)
        return audit_response(entry)

    async def SubmitFeedback(
        self, request: pb.SubmitFeedbackRequest, context: GrpcCall
    ) -> pb.SubmitFeedbackResponse:
        """See the proto."""
        _check(request, "request_id")
        if not 0 <= request.grade <= 1:  # NaN too
            raise InvalidRequest.of("grade", "must be in [0, 1]")
        grade = pb.Grade(grade=request.grade, create_time=timestamp(unix_ms()))
        record = await self.store.grade(request.request_id, grade, context.caller.writable_tenant)
        self.drift.graded(record, grade.grade)
        return pb.SubmitFeedbackResponse()

    # A coroutine that writes: see `Generator.stream`.
    async def StreamOutcomes(self, request: pb.StreamOutcomesRequest, context: GrpcCall) -> None:
        """See the proto."""
        _check(request)
        if not 0 <= request.since_time.seconds <= unix_ms() // 1000 + DAY_S:
            raise InvalidRequest.of("since_time", "must be a time between 1970 and tomorrow")
        tenants = self._readable(list(request.tenants), context)
        listed = self.store.list_outcomes(tenants, ms_of(request.since_time))
        async with aclosing(listed):
            async for response in listed:
                await context.write(response)

    async def GetRouterHealth(
        self, request: pb.GetRouterHealthRequest, context: GrpcCall
    ) -> pb.GetRouterHealthResponse:
        """See the proto."""
        question = GatewayQuery(router_health=RouterHealthQuery())
        answers, _ = await self.shared.peers.query_all(question)
        return sum_router_health([answer.router_health for answer in answers])

    async def _router_health_here(self, _: RouterHealthQuery) -> GatewayReply:
        return GatewayReply(router_health=self.drift.health())

    async def ClearAnswers(
        self, request: pb.ClearAnswersRequest, context: GrpcCall
    ) -> pb.ClearAnswersResponse:
        """See the proto."""
        _check(request)
        return pb.ClearAnswersResponse(unreached_gateways=await self.shared.answers.clear(request))

    def _readable(self, tenants: list[str], context: GrpcCall) -> list[str]:
        """Return the tenants whose outcomes the caller may read, empty for all; raise PermissionDenied."""
        caller = context.caller
        if not is_local(context.peer):
            raise PermissionDenied(
                "outcomes have prompts and are not sent to other machines; call from the gateway's machine"
            )
        if caller.readable_tenant is None:
            return tenants
        if set(tenants) - {caller.readable_tenant}:
            raise PermissionDenied(
                f"outcomes of other tenants need the role operator or auditor; name {caller.readable_tenant}, or none"
            )
        return [caller.readable_tenant]


def _live_workers(processes: list[pb.ProcessMetrics]) -> dict[tuple[str, str], bool]:
    """Return whether a batcher reaches each worker, by model and name."""
    live: dict[tuple[str, str], bool] = {}
    metrics = (metric for process in processes for metric in process.metrics)
    for point in (point for metric in metrics for point in metric.points):
        model, worker = point.labels
        live[model, worker] = bool(point.value) or live.get((model, worker), False)
    return live


def _check(request: Message, needed: str = "") -> None:
    """Raise InvalidRequest for fields that are no valid names, and if the field `needed` is not set."""
    if needed and not getattr(request, needed):
        raise InvalidRequest.of(needed, "is not set")
    for field, value in request.ListFields():
        names = [value] if isinstance(value, str) else value
        if field.name in _NAMES and not (len(names) <= LIST_MAX and all(map(is_token, names))):
            raise InvalidRequest.of(
                field.name,
                f"must be 1 to 64 letters, digits, '-' and '_', in a list at most {LIST_MAX} times",
            )


def _age_s(stream: ResultCollector, now: float) -> float:
    return now - stream.arrived_at


def _described(stream: ResultCollector, gateway: str, now: float) -> pb.RunningRequest:
    current = stream.current
    return pb.RunningRequest(
        request_id=stream.request_id,
        tenant=stream.tenant,
        priority=value_of(Priority, current.run_class.priority_class),
        model=current.model,
        state=value_of(pb.RequestState, stream.state.name),
        age=duration(_age_s(stream, now) * 1e3),
        remaining=duration(max(0.0, current.deadline - now) * 1e3),
        prompt_tokens=current.prompt_tokens,
        completion_tokens=current.completion_tokens,
        gateway=gateway,
    )


def _counts(streams: Iterable[ResultCollector], now: float) -> list[pb.RunningCount]:
    groups: defaultdict[tuple[str, str, str], list[ResultCollector]] = defaultdict(list)
    for stream in streams:
        run = stream.current
        groups[stream.tenant, run.model, run.run_class.priority_class].append(stream)
    return [
        pb.RunningCount(
            tenant=tenant,
            model=model,
            priority=value_of(Priority, priority_class),
            requests=len(group),
            waiting=sum(not stream.current.completion_tokens for stream in group),
            completion_tokens=sum(stream.current.completion_tokens for stream in group),
            oldest_age=duration(max(_age_s(stream, now) for stream in group) * 1e3),
        )
        for (tenant, model, priority_class), group in groups.items()
    ]


def sum_router_health(answers: Sequence[pb.GetRouterHealthResponse]) -> pb.GetRouterHealthResponse:
    """Return the health over all gateways of each head of the first answer.

    Rows are sums, measures are means weighted by rows; a head has drifted if it has at one gateway.
    """
    total = pb.GetRouterHealthResponse()
    total.CopyFrom(answers[0])
    every = [head for answer in answers for head in answer.routers]
    for head in total.routers:
        same = [other for other in every if _name(other) == _name(head)]
        _sum(head.inputs, [other.inputs for other in same], "stability_index")
        _sum(head.accuracy, [other.accuracy for other in same], "bias", "half_width", "brier")
    total.gateways[:] = [name for answer in answers for name in answer.gateways]
    return total


def _name(head: pb.RouterHealth) -> tuple[str, str, int]:
    return head.policy, head.version, head.head


Drift = TypeVar("Drift", pb.InputDrift, pb.AccuracyDrift)


def _sum(total: Drift, parts: Sequence[Drift], judged: str, *others: str) -> None:
    """Make `total` the sum of `parts`; parts without the measure `judged` have no others either."""
    states = {part.state for part in parts}
    total.state = next((state for state in _WORST_FIRST if state in states), total.state)
    total.rows = sum(part.rows for part in parts)
    measured = [part for part in parts if part.HasField(judged)]  # type: ignore[arg-type]
    rows = sum(part.rows for part in measured)
    for name in (judged, *others) if rows else ():
        setattr(total, name, sum(getattr(part, name) * part.rows for part in measured) / rows)


_WORST_FIRST: Final = (pb.DRIFT_STATE_DRIFTED, pb.DRIFT_STATE_STABLE)
