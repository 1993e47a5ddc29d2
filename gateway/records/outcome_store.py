"""Reads what requests taught back from JetStream, joined with their grades. The text of a tenant that does not let its
prompts be kept, or does not any more, is given to nobody."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress
from typing import Final

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig

from gateway.records.outcome import response_of
from gateway.records.stored import MIB, READ_S, away, ensure, last
from sluice.errors import OutcomesNotKept
from sluice.internal.v1.outcome_pb2 import Outcome
from sluice.settings.routing import OutcomeSettings
from sluice.v1.admin_pb2 import Grade, ListOutcomesResponse
from sluice.wire import jetstream, subjects
from sluice.wire.codec import unpack

TOGETHER_MAX: Final = 64
"""Messages that are read at once."""
_FORGOTTEN_S: Final = 30.0
"""A reader that broke off leaves nothing on the server after this long."""


class OutcomeStore:
    """The reader of `SLUICE_OUTCOMES`; the recorder writes."""

    def __init__(self, settings: OutcomeSettings) -> None:
        self._settings = settings
        self._js: JetStreamContext | None = None

    async def start(self, js: JetStreamContext) -> None:
        """Creates the stream where a tenant is named.

        Raises:
            nats.errors.Error: JetStream does not answer, or refuses the limits.
        """
        self._js = js
        await self.use(self._settings)

    async def use(self, settings: OutcomeSettings) -> None:
        """Takes other settings; raises as `start`, and then the old ones stay."""
        assert self._js is not None, "started"
        if settings.tenants:
            limits = settings.max_mib * MIB, settings.max_age_h * 3600
            await ensure(self._js, jetstream.outcomes_stream(*limits))
        self._settings = settings

    def keeps(self, tenant: str) -> bool:
        """Whether the tenant lets its prompts be kept."""
        return tenant in self._settings.tenants

    async def find(self, request_id: str) -> Outcome | None:
        """What is kept of one request; None: nothing, or its tenant does not let it be kept any more.

        Raises:
            TransportUnavailable: JetStream does not answer.
        """
        if not self._settings.tenants:
            return None
        assert self._js is not None, "started"
        # Not direct: only the stream itself can look for a subject of which the tenant is not known.
        subject = subjects.outcome_of_any(request_id)
        data = await last(self._js, subjects.OUTCOMES_STREAM, subject, direct=False)
        outcome = None if data is None else unpack(Outcome, data)
        return outcome if outcome is not None and self.keeps(outcome.tenant) else None

    async def list(
        self, tenants: Sequence[str], since_unix_ms: float
    ) -> AsyncGenerator[ListOutcomesResponse, None]:
        """Outcomes of ``tenants`` (of all, when there are none) of which something is known, tenant by tenant.

        Raises:
            OutcomesNotKept: no tenant lets its prompts be kept, or one of ``tenants`` does not.
            TransportUnavailable: JetStream does not answer.
        """
        for tenant in self._checked(tenants):
            grades = {
                _request_of(message): unpack(Grade, message.data).grade
                async for message in self._read(subjects.outcome_grades_of(tenant))
            }
            async for message in self._read(subjects.outcomes_of(tenant)):
                outcome = unpack(Outcome, message.data)
                response = response_of(outcome, grades.get(outcome.request_id))
                if response is not None and outcome.answered_unix_ms >= since_unix_ms:
                    yield response

    def _checked(self, tenants: Sequence[str]) -> Sequence[str]:
        kept = self._settings.tenants
        strange = [tenant for tenant in tenants if tenant not in kept]
        if strange or not kept:
            who = f"of {strange[0]}" if strange else "of any tenant"
            raise OutcomesNotKept(
                f"no outcomes are kept {who}; a tenant that lets its prompts be kept is named in"
                " routing.outcomes.tenants"
            )
        return list(dict.fromkeys(tenants)) or kept

    async def _read(self, subject: str) -> AsyncIterator[Msg]:
        assert self._js is not None, "started"
        config = ConsumerConfig(
            ack_policy=AckPolicy.NONE, inactive_threshold=_FORGOTTEN_S, mem_storage=True
        )
        try:
            reader = await self._js.pull_subscribe(
                subject, stream=subjects.OUTCOMES_STREAM, config=config
            )
            try:
                left = (await reader.consumer_info()).num_pending or 0
                while left:
                    messages = await reader.fetch(min(TOGETHER_MAX, left), timeout=READ_S)
                    left = messages[-1].metadata.num_pending
                    for message in messages:
                        yield message
            finally:
                with suppress(NatsError):
                    await reader.unsubscribe()
        except (TimeoutError, NatsError) as error:
            raise away(error) from error


def _request_of(message: Msg) -> str:
    return message.subject.split(".")[-2]
