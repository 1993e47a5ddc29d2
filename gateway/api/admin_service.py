"""``sluice.v1.AdminService`` over grpc.aio."""

from contextlib import aclosing
from typing import Any, Final

from gateway.api.metadata import is_local
from gateway.records.record_builder import audit_response
from gateway.records.store import RecordStore
from gateway.shared.peers import Peers
from gateway.shared.sums import sum_router_health
from gateway.telemetry.drift import DriftMonitor
from sluice.errors import InvalidRequest, PermissionDenied
from sluice.internal.v1.gateway_pb2 import GatewayAnswer, GatewayQuestion, RouterHealthQuestion
from sluice.v1 import admin_pb2
from sluice.v1.admin_pb2 import (
    GetAuditEntryRequest,
    GetAuditEntryResponse,
    GetRequestRecordRequest,
    GetRequestRecordResponse,
    GetRouterHealthRequest,
    GetRouterHealthResponse,
    Grade,
    StreamOutcomesRequest,
    SubmitFeedbackRequest,
    SubmitFeedbackResponse,
)
from sluice.v1.admin_pb2_grpc import AdminServiceServicer
from sluice.wire.clock import ms_of, timestamp, unix_ms
from sluice.wire.subjects import is_token

ADMIN_SERVICE: Final = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name


class AdminService(AdminServiceServicer):
    """Records, grades, audit entries, outcomes and the health of routers."""

    def __init__(
        self, store: RecordStore, drift: DriftMonitor, peers: Peers, *, allow_remote_outcomes: bool
    ) -> None:
        self._store = store
        self._allow_remote_outcomes = allow_remote_outcomes
        self._drift = drift
        self._peers = peers
        peers.answer("router_health", self._own_health)

    async def GetRequestRecord(
        self, request: GetRequestRecordRequest, context: Any
    ) -> GetRequestRecordResponse:
        """See the proto."""
        return await self._store.explain(_request_id(request.request_id))

    async def GetAuditEntry(
        self, request: GetAuditEntryRequest, context: Any
    ) -> GetAuditEntryResponse:
        """See the proto."""
        return audit_response(await self._store.audit_entry(_request_id(request.request_id)))

    async def SubmitFeedback(
        self, request: SubmitFeedbackRequest, context: Any
    ) -> SubmitFeedbackResponse:
        """See the proto."""
        if not 0 <= request.grade <= 1:  # NaN too
            raise InvalidRequest.of("grade", "must be in [0, 1]")
        grade = Grade(grade=request.grade, create_time=timestamp(unix_ms()))
        record = await self._store.grade(_request_id(request.request_id), grade)
        self._drift.graded(record, grade.grade)
        return SubmitFeedbackResponse()

    # A coroutine that writes: see InferenceService.Generate.
    async def StreamOutcomes(  # type: ignore[override]
        self, request: StreamOutcomesRequest, context: Any
    ) -> None:
        """See the proto."""
        if not (self._allow_remote_outcomes or is_local(context.peer())):
            raise PermissionDenied(
                "outcomes have prompts, and callers of other machines get none: call from the gateway's machine, or "
                "set gateway.allow_remote_outcomes"
            )
        listed = self._store.list_outcomes(list(request.tenants), ms_of(request.since_time))
        async with aclosing(listed):
            async for response in listed:
                await context.write(response)

    async def GetRouterHealth(
        self, request: GetRouterHealthRequest, context: Any
    ) -> GetRouterHealthResponse:
        """See the proto."""
        question = GatewayQuestion(router_health=RouterHealthQuestion())
        others = (await self._peers.ask_all(question)).values()
        return sum_router_health(
            self._drift.health(), [one.router_health for one in others if one is not None]
        )

    async def _own_health(self, _: GatewayQuestion) -> GatewayAnswer:
        return GatewayAnswer(router_health=self._drift.health())


def _request_id(given: str) -> str:
    if not is_token(given):
        raise InvalidRequest.of("request_id", "is none; take it from Started, such as req-...")
    return given
