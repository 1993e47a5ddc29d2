"""Metrics over NATS: each process answers who asks for its own, so `sluice top` needs no port but the gateway's."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from opentelemetry.sdk.metrics.export import HistogramDataPoint

from sluice.errors import TransportUnavailable
from sluice.telemetry.instruments import Instruments
from sluice.v1.admin_pb2 import MetricPoint, MetricSeries, ProcessMetrics, ReadMetricsRequest
from sluice.wire import subjects
from sluice.wire.codec import MalformedMessage, OversizedMessage, pack, unpack
from sluice.wire.permissions import may_send_as

logger = logging.getLogger(__name__)

_SERVICES: Final = "sluice-"
"""What the names of services begin with."""
GATHER_S: Final = 0.25
"""How long answers are waited for, seconds: nobody knows how many processes there are."""
ANSWERS_MAX: Final = 1024
"""Processes that are read at a time."""
ANSWERS_BYTES: Final = 16 * 1024 * 1024
"""Most bytes of all answers together; those of a mesh with thirty processes have 3 MiB."""
LATE_S: Final = 3.0
"""How much longer answers are waited for while those that came are not enough for `read_all`, in seconds."""


class MetricsExchange:
    """The metrics of this process for others, and those of all for this one.

    Attributes:
        gather_s: How long answers are waited for, in seconds; see `GATHER_S`.
    """

    def __init__(
        self, service: str, instance: str, instruments: Instruments, gather_s: float = GATHER_S
    ) -> None:
        self.gather_s = gather_s
        self._service = service
        self._instance = instance
        self._instruments = instruments
        self._client: Client | None = None

    async def start(self, client: Client) -> None:
        """Start to answer queries."""
        self._client = client
        await client.subscribe(subjects.METRICS, cb=self._answer)

    async def read_all(
        self,
        names: Collection[str],
        enough: Callable[[list[ProcessMetrics]], bool] = lambda _: True,
    ) -> list[ProcessMetrics]:
        """Return the metrics with these `names`, or all, of every process that answers within `gather_s`.

        Answers are waited for up to `LATE_S` longer while those that came are not `enough`.

        Raises:
            TransportUnavailable: NATS is not connected.
        """
        answers: list[ProcessMetrics] = []
        arrived, room = asyncio.Event(), ANSWERS_BYTES

        async def take(message: Msg) -> None:
            nonlocal room
            room -= len(message.data)
            if room < 0 or len(answers) >= ANSWERS_MAX:
                return
            try:
                answer = unpack(ProcessMetrics, message.data)
            except MalformedMessage as error:
                logger.warning("ignored malformed metrics of another process: %s", error)
                return
            account = message.subject.removeprefix(inbox)[1:]
            if may_send_as(account, answer.service.removeprefix(_SERVICES), answer.instance):
                answers.append(answer)
                arrived.set()
            else:
                logger.warning("ignored metrics of %s from account %s", answer.instance, account)

        assert self._client is not None, "started"
        if not self._client.is_connected:
            raise TransportUnavailable("NATS is not connected")
        inbox = subjects.metrics_to(self._instance, secrets.token_hex(8))
        subscriptions = [
            await self._client.subscribe(subject, cb=take) for subject in (inbox, f"{inbox}.*")
        ]
        try:
            question = ReadMetricsRequest(names=names)
            await self._client.publish(subjects.METRICS, pack(question), inbox)
            await asyncio.sleep(self.gather_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(LATE_S):
                    while not enough(answers):
                        arrived.clear()
                        await arrived.wait()
        finally:
            for subscription in subscriptions:
                await subscription.unsubscribe()
        return sorted(answers, key=lambda process: (process.service, process.instance))

    async def _answer(self, message: Msg) -> None:
        assert self._client is not None, "started"
        try:
            names = unpack(ReadMetricsRequest, message.data).names
            # The SDK takes milliseconds to collect what ten models need.
            own = await asyncio.to_thread(self._own, set(names))
            await self._client.publish(message.reply, pack(own))
        except (MalformedMessage, OversizedMessage, NatsError) as error:
            logger.warning("publishing metrics failed: %s", error)

    def _own(self, names: Collection[str]) -> ProcessMetrics:
        return ProcessMetrics(
            service=self._service,
            instance=self._instance,
            metrics=[
                MetricSeries(
                    name=metric.name,
                    labels=metric.labels,
                    bounds=metric.bounds,
                    points=[_point(labels, value) for labels, value in points],
                )
                for metric, points in self._instruments.collect(names)
            ],
        )


def _point(labels: tuple[str, ...], value: float | HistogramDataPoint) -> MetricPoint:
    if isinstance(value, HistogramDataPoint):
        return MetricPoint(labels=labels, value=value.sum, buckets=value.bucket_counts)
    return MetricPoint(labels=labels, value=value)
