"""``sluice.v1.AdminService`` over grpc.aio."""

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, Final

from gateway.api.interceptor import is_local
from gateway.records.store import RecordStore
from gateway.shared.operators import LIST_MAX, Operators
from gateway.shared.state import SharedState
from gateway.telemetry.drift import DriftMonitor
from gateway.telemetry.request_record import audit_response
from sluice.errors import InvalidRequest, PermissionDenied, RequestUnknown, WorkerUnknown
from sluice.settings import Settings
from sluice.telemetry import catalog
from sluice.telemetry.exchange import MetricsExchange
from sluice.v1 import admin_pb2 as pb
from sluice.v1.admin_pb2_grpc import AdminServiceServicer
from sluice.wire.clock import ms_of, timestamp, unix_ms
from sluice.wire.subjects import is_token

WORKER_CHARS_MAX: Final = 256
DAY_S: Final = 86_400
ADMIN_SERVICE: Final = pb.DESCRIPTOR.services_by_name["AdminService"].full_name


class AdminService(AdminServiceServicer):
    """What runs; records, grades, audit entries, outcomes and the health of routers."""

    def __init__(
        self,
        settings: Settings,
        shared: SharedState,
        operators: Operators,
        store: RecordStore,
        drift: DriftMonitor,
        metrics: MetricsExchange,
    ) -> None:
        self._settings = settings
        self._shared = shared
        self._operators = operators
        self._store = store
        self._drift = drift
        self._metrics = metrics

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: Any
    ) -> pb.ListRequestsResponse:
        """See the proto."""
        if request.limit > LIST_MAX:
            raise InvalidRequest.of("limit", f"must be at most {LIST_MAX}")
        _check_names(tenant=request.tenant, model=request.model)
        request.tenant = context.caller.reads or request.tenant
        return await self._operators.requests(request)

    async def ListTenants(
        self, request: pb.ListTenantsRequest, context: Any
    ) -> pb.ListTenantsResponse:
        """See the proto."""
        _check_names(tenant=request.tenant)
        tenant = context.caller.reads or request.tenant
        return self._shared.usage.listed(tenant, self._settings.currency)

    async def ForgetTenant(
        self, request: pb.ForgetTenantRequest, context: Any
    ) -> pb.ForgetTenantResponse:
        """See the proto."""
        if not is_token(request.tenant):
            raise InvalidRequest.of("tenant", "must be 1 to 64 letters, digits, '-' and '_'")
        return await self._operators.forget(request.tenant)

    async def CancelRequests(
        self, request: pb.CancelRequestsRequest, context: Any
    ) -> pb.CancelRequestsResponse:
        """See the proto."""
        if bool(request.request_ids) == bool(request.tenant):
            raise InvalidRequest.of("request_ids", "name requests, or a tenant")
        _check_list("request_ids", request.request_ids, LIST_MAX)
        _check_names(tenant=request.tenant)
        cancelled = await self._operators.cancel(request)
        if request.request_ids and not cancelled.request_ids:
            raise RequestUnknown(f"{', '.join(request.request_ids)}: no such request runs now")
        return cancelled

    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: Any
    ) -> pb.DrainWorkerResponse:
        """See the proto."""
        _check_names(model=request.model)
        if len(request.worker) > WORKER_CHARS_MAX:
            raise InvalidRequest.of("worker", f"must have at most {WORKER_CHARS_MAX} characters")
        asked = (request.model, request.worker)
        live = _live_workers(
            await self._metrics.read_all(
                (catalog.WORKER_LIVE.name,),
                lambda found: request.undo or asked in _live_workers(found),
            )
        )
        # One that was taken out of the configuration can still be taken out of the record.
        if not request.undo and asked not in live:
            known = ", ".join(" ".join(one) for one in sorted(live)) or "none"
            raise WorkerUnknown(
                f"no batcher knows a worker {request.worker!r} of {request.model!r}; there are: {known}"
            )
        change = self._shared.drains.change
        record = await change(request.model, request.worker, drained=not request.undo)
        drained = {(one.model, one.worker) for one in record.workers}
        others = {one for one, reached in live.items() if reached and one[0] == request.model}
        return pb.DrainWorkerResponse(
            others=len(others - drained - {asked}),
            drained=[" ".join(one) for one in sorted(drained)],
        )

    async def ReadMetrics(
        self, request: pb.ReadMetricsRequest, context: Any
    ) -> pb.ReadMetricsResponse:
        """See the proto."""
        if len(request.names) > len(catalog.METRICS):
            raise InvalidRequest.of("names", f"there are {len(catalog.METRICS)} metrics")
        unknown = sorted(set(request.names) - {one.name for one in catalog.METRICS})
        if unknown:
            raise InvalidRequest.of("names", f"no metrics of the mesh: {', '.join(unknown)}")
        return pb.ReadMetricsResponse(processes=await self._metrics.read_all(request.names))

    async def GetRequestRecord(
        self, request: pb.GetRequestRecordRequest, context: Any
    ) -> pb.GetRequestRecordResponse:
        """See the proto."""
        return await self._store.explain(_request_id(request.request_id), context.caller.reads)

    async def GetAuditEntry(
        self, request: pb.GetAuditEntryRequest, context: Any
    ) -> pb.GetAuditEntryResponse:
        """See the proto."""
        request_id = _request_id(request.request_id)
        return audit_response(await self._store.audit_entry(request_id, context.caller.reads))

    async def SubmitFeedback(
        self, request: pb.SubmitFeedbackRequest, context: Any
    ) -> pb.SubmitFeedbackResponse:
        """See the proto."""
        if not 0 <= request.grade <= 1:  # NaN too
            raise InvalidRequest.of("grade", "must be in [0, 1]")
        grade = pb.Grade(grade=request.grade, create_time=timestamp(unix_ms()))
        request_id = _request_id(request.request_id)
        record = await self._store.grade(request_id, grade, context.caller.changes)
        self._drift.graded(record, grade.grade)
        return pb.SubmitFeedbackResponse()

    # A coroutine that writes: see InferenceService.Generate.
    async def StreamOutcomes(  # type: ignore[override]
        self, request: pb.StreamOutcomesRequest, context: Any
    ) -> None:
        """See the proto."""
        _check_list("tenants", request.tenants, LIST_MAX)
        if not 0 <= request.since_time.seconds <= unix_ms() // 1000 + DAY_S:
            raise InvalidRequest.of("since_time", "must be a time between 1970 and tomorrow")
        tenants = self._readable(list(request.tenants), context)
        listed = self._store.list_outcomes(tenants, ms_of(request.since_time))
        async with aclosing(listed):
            async for response in listed:
                await context.write(response)

    async def GetRouterHealth(
        self, request: pb.GetRouterHealthRequest, context: Any
    ) -> pb.GetRouterHealthResponse:
        """See the proto."""
        return await self._operators.router_health()

    async def ClearAnswers(
        self, request: pb.ClearAnswersRequest, context: Any
    ) -> pb.ClearAnswersResponse:
        """See the proto."""
        return pb.ClearAnswersResponse(unreached_gateways=await self._shared.answers.clear(request))

    def _readable(self, tenants: list[str], context: Any) -> list[str]:
        """The tenants whose outcomes are asked for, empty for all; raises PermissionDenied."""
        caller = context.caller
        allowed = self._settings.gateway.allow_remote_outcomes or is_local(context.peer())
        if not allowed:
            raise PermissionDenied(
                "outcomes have prompts, and callers of other machines get none: call from the gateway's machine, or "
                "set gateway.allow_remote_outcomes"
            )
        if caller.reads is None:
            return tenants
        if set(tenants) - {caller.reads}:
            raise PermissionDenied(
                f"outcomes of other tenants need the role operator or auditor; name {caller.reads}, or none"
            )
        return [caller.reads]


def _live_workers(processes: list[pb.ProcessMetrics]) -> dict[tuple[str, str], bool]:
    """Whether a batcher reaches it, of each worker, by model and name."""
    found: dict[tuple[str, str], bool] = {}
    points = (point for one in processes for series in one.metrics for point in series.points)
    for point in points:
        model, worker = point.labels
        found[model, worker] = bool(point.value) or found.get((model, worker), False)
    return found


def _check_names(**names: str) -> None:
    """Of a tenant or a model, by their fields; empty is any."""
    for field, name in names.items():
        if name and not is_token(name):
            raise InvalidRequest.of(field, "is not the name of one")


def _check_list(field: str, names: Sequence[str], most: int) -> None:
    if len(names) > most or not all(map(is_token, names)):
        raise InvalidRequest.of(field, f"must be at most {most} names of up to 64 characters")


def _request_id(given: str) -> str:
    if not is_token(given):
        raise InvalidRequest.of("request_id", "is none; take it from Started, such as req-...")
    return given
