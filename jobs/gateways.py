"""Calls that carry a job's items to gateways and their answers back: many items per call."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc
from google.rpc import status_pb2

from jobs.items import Item
from sluice.client.channel import (
    LOOKUP_S,
    RECONNECT_IN_MESH_MS_MAX,
    bearer_metadata,
    error_of,
    open_aio,
)
from sluice.defaults import AUTO
from sluice.errors import SluiceError, TransportUnavailable, from_status
from sluice.internal.v1.items_pb2 import RunRequest, RunResponse
from sluice.internal.v1.items_pb2_grpc import ItemsServiceStub
from sluice.tls import channel_credentials
from sluice.v1.inference_pb2 import EmbedRequest, ListModelsRequest
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from sluice.wire.clock import duration
from sluice.wire.groups import next_group

logger = logging.getLogger(__name__)

RECONNECT_S: Final = 0.25
"""Pause before a call that broke is opened again, in seconds."""


class GatewayClient:
    """The gateways of the mesh, behind one channel that spreads calls over them.

    Attributes:
        metadata: of every call: proves that it comes from a process of the mesh.
    """

    def __init__(self, address: str, mesh_key: str | None = None, tls: Path | None = None) -> None:
        """Create the channel; `tls` is the folder of this process's certificate for calls between processes."""
        self.metadata = bearer_metadata(mesh_key)
        self._channel = open_aio(
            address, channel_credentials(tls), reconnect_ms_max=RECONNECT_IN_MESH_MS_MAX
        )
        self.stub: Any = ItemsServiceStub(self._channel)  # its types are those of blocking calls
        self.models = InferenceServiceStub(self._channel)
        self.count = max(1, len(address.split(",")))

    async def model_names(self) -> set[str]:
        """Return the names of models that requests may have.

        Raises:
            SluiceError: no gateway responds, or it refuses the call.
        """
        request = ListModelsRequest()
        try:
            listed = await self.models.ListModels(request, timeout=LOOKUP_S, metadata=self.metadata)
        except grpc.aio.AioRpcError as failed:
            raise error_of(failed) from failed
        return {AUTO, *(model.name for model in listed.models)}

    async def close(self) -> None:
        """End every call."""
        await self._channel.close()


class ItemCalls:
    """Calls of one attempt, one per address of a gateway; items of a call that ends come back by `on_returned`."""

    def __init__(
        self,
        gateways: GatewayClient,
        metadata: tuple[tuple[str, str], ...],
        on_answer: Callable[[Item, RunResponse], None],
        on_returned: Callable[[Item], None],
    ) -> None:
        self.stub = gateways.stub
        self.metadata = (*metadata, *gateways.metadata)
        self.on_answer, self.on_returned = on_answer, on_returned
        self._calls = [_ItemStream(self) for _ in range(gateways.count)]

    async def run(self) -> None:
        """Keep the calls open until cancelled."""
        async with asyncio.TaskGroup() as group:
            for call in self._calls:
                group.create_task(call.run())

    def send(self, item: Item, timeout_s: float) -> bool:
        """Send an item on the call with the fewest; return False while no gateway is connected."""
        calls = [call for call in self._calls if call.connected]
        if not calls:
            return False
        # gRPC spreads calls over gateways, so the emptiest call is that of the idlest gateway.
        min(calls, key=lambda call: len(call.sent)).send(item, timeout_s)
        return True


class _ItemStream:
    def __init__(self, of: ItemCalls) -> None:
        self._of = of
        self.sent: dict[int, Item] = {}
        self._outgoing: deque[RunRequest] = deque()
        self._filled = asyncio.Event()
        self.connected = True
        """False only for `RECONNECT_S` after a call has ended: gRPC connects with the next item."""

    def send(self, item: Item, timeout_s: float) -> None:
        request = RunRequest(id=item.position)
        if isinstance(item.request, EmbedRequest):
            request.embed.CopyFrom(item.request)
        else:
            request.request.CopyFrom(item.request)
        request.timeout.CopyFrom(duration(timeout_s * 1e3))
        self.sent[item.position] = item
        self._outgoing.append(request)
        self._filled.set()

    async def run(self) -> None:
        while True:
            first = await self._next()
            call = self._of.stub.Run(metadata=self._of.metadata)
            sending = asyncio.ensure_future(self._send(call, first))
            error: SluiceError = TransportUnavailable(
                "the gateway ended the call", retry_after_s=0.0
            )
            try:
                async for message in call:
                    for response in (message, *message.more):
                        item = self.sent.pop(response.id, None)
                        if item is not None:
                            self._of.on_answer(item, response)
            except grpc.aio.AioRpcError as failed:
                error = error_of(failed)
            finally:
                sending.cancel()
                call.cancel()
            self.connected = False
            logger.warning(
                "lost a call to a gateway, resending %d items: %s", len(self.sent), error.message
            )
            lost, self.sent, self._outgoing = self.sent, {}, deque()
            for item in lost.values():
                self._of.on_returned(item)
            await asyncio.sleep(RECONNECT_S)
            self.connected = True

    async def _send(self, call: Any, request: RunRequest) -> None:
        try:
            while True:
                await call.write(request)
                request = await self._next()
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            return  # whoever reads gets the reason

    async def _next(self) -> RunRequest:
        while not self._outgoing:
            self._filled.clear()
            await self._filled.wait()
        return next_group(self._outgoing)


def error_in(response: RunResponse) -> SluiceError:
    """Return the error of an item that has no answer."""
    error = from_status(status_pb2.Status.FromString(response.error))
    return error or TransportUnavailable("the gateway's answer cannot be read", retry_after_s=0.0)
