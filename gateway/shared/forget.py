"""Deletes what is kept of a tenant, at all gateways."""

from gateway.records.store import RecordStore
from gateway.shared.state import SharedState
from gateway.streaming.registry import Registry
from sluice.internal.v1.gateway_pb2 import ForgetQuestion, GatewayAnswer, GatewayQuestion
from sluice.internal.v1.identity_pb2 import ApiKeyRecord
from sluice.v1.admin_pb2 import CancelRequestsRequest, ClearAnswersRequest, ForgetTenantResponse

WRITE_S = 2.0
"""How long records that are queued may take to be written, so that they are deleted too, seconds."""


class Forgetting:
    """Deletes what each component keeps of a tenant; API keys first, so that nothing new is created meanwhile."""

    def __init__(self, shared: SharedState, registry: Registry, store: RecordStore) -> None:
        self._shared = shared
        self._registry = registry
        self._store = store
        shared.peers.answer("forget", self._answer)

    async def forget(self, tenant: str) -> ForgetTenantResponse:
        """Returns what was deleted; raises TransportUnavailable, and may be called again then."""
        keys = await self._delete_api_keys(tenant)
        cancelled = await self._shared.running.cancel(CancelRequestsRequest(tenant=tenant))
        await self._forget_here(tenant)
        question = GatewayQuestion(forget=ForgetQuestion(tenant=tenant))
        answers = await self._shared.peers.ask_all(question, 2 * WRITE_S)
        silent = {name for name, one in answers.items() if one is None or one.problem}
        await self._shared.idempotency_keys.purge(f"{tenant}.*")
        silent |= {*await self._shared.answers.clear(ClearAnswersRequest(tenant=tenant))}
        stored = await self._store.forget(tenant)
        return ForgetTenantResponse(
            api_keys=keys,
            cancelled=len(cancelled.request_ids),
            records=stored.records,
            audit_entries=stored.audit_entries,
            outcomes=stored.outcomes,
            dead_letters=stored.dead_letters,
            unreached_gateways=sorted(silent),
            kept=[stored.kept] if stored.kept else [],
        )

    async def _delete_api_keys(self, tenant: str) -> int:
        every = self._shared.api_keys.read_all(ApiKeyRecord)
        own = [key async for key, record in every if record.tenant == tenant]
        for key in own:
            await self._shared.api_keys.purge(key)
        return len(own)

    async def _forget_here(self, tenant: str) -> None:
        self._registry.drop_replays(tenant)
        await self._store.flush(WRITE_S)

    async def _answer(self, question: GatewayQuestion) -> GatewayAnswer:
        await self._forget_here(question.forget.tenant)
        return GatewayAnswer()
