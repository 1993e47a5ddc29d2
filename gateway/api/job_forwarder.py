"""Serves `sluice.v1.JobService`: each call is forwarded to a process of `jobs`, its messages unread."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from gateway.admission.request_context import Call
from gateway.api.methods import GrpcCall
from gateway.identity.caller import JOB_READS, MESH
from sluice.client.channel import RECONNECT_IN_MESH_MS_MAX, error_of, open_aio
from sluice.defaults import ALL_TENANTS_METADATA, KEY_METADATA, TENANT_METADATA
from sluice.errors import (
    STATUS_DETAILS,
    JobsDisabled,
    MessageTooLarge,
    SluiceError,
    TransportUnavailable,
)
from sluice.settings import JobsSettings
from sluice.telemetry.tracing import TRACEPARENT
from sluice.tls import channel_credentials
from sluice.v1 import jobs_pb2
from sluice.v1.jobs_pb2_grpc import JobServiceStub
from sluice.wire.job_calls import signed

JOB_SERVICE: Final = jobs_pb2.DESCRIPTOR.services_by_name["JobService"].full_name
MESSAGE_BYTES_MAX: Final = 1 << 20
"""Largest message, in bytes; a process of jobs takes a specification of 64 KiB, and pieces of a file of 512 KiB."""
_TRACE: Final = re.compile(r"[0-9a-f-]{55,128}")


class JobForwarder(grpc.GenericRpcHandler):
    """Forwards calls. To HTTP/2 each of them is a stream of messages in both directions."""

    def __init__(
        self, settings: JobsSettings, mesh_key: Callable[[], str | None], tls: Path | None = None
    ) -> None:
        """Forward to the address of `settings`.

        Args:
            settings: Where processes of `jobs` are.
            mesh_key: Returns the key that signs calls; None for unsigned calls.
            tls: Folder of the certificate that is shown; None: calls are not encrypted.

        Raises:
            SettingsError: The certificate cannot be used.
        """
        self._address = settings.address
        self._mesh_key = mesh_key
        self._credentials = channel_credentials(tls)
        self._channel: grpc.aio.Channel | None = None

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a method of JobService; None for other methods."""
        method = str(handler_call_details.method)
        if not method.startswith(f"/{JOB_SERVICE}/"):
            return None
        return grpc.stream_stream_rpc_method_handler(partial(self._forward, method))

    def begin(self, call: Call, method: str, *request: Message, wait_s: float) -> Any:
        """Begin a call of our own on behalf of `call`; use it in a block of `errors_of_jobs`.

        Raises:
            JobsDisabled: The mesh has no process of `jobs`.
        """
        begin = getattr(JobServiceStub(self._open()), method)
        return begin(*request, metadata=self.metadata(call), timeout=wait_s)

    def metadata(self, call: Call, method: str = "") -> tuple[tuple[str, str], ...]:
        """Return the metadata of `call` for a process of `jobs`.

        A process of the mesh, and everybody where no credentials are needed, calls for one tenant.

        Args:
            call: The call that is forwarded.
            method: The method that is called. Its caller may see the jobs of other tenants if its role allows it for
                this method; never if that is empty.
        """
        caller = call.caller
        identity = {TENANT_METADATA: caller.tenant}
        scope = caller.readable_tenant if method in JOB_READS else caller.writable_tenant
        if caller.key_id:
            identity[KEY_METADATA] = caller.key_id
        if method and scope is None and MESH not in caller.roles:
            identity[ALL_TENANTS_METADATA] = "1"
        trace = call.metadata.get(TRACEPARENT, "")
        # A header of HTTP may have characters that metadata cannot; a trace context has none of them.
        traced = ((TRACEPARENT, trace),) if _TRACE.fullmatch(trace) else ()
        return (*signed(identity, self._mesh_key()), *traced)

    async def close(self) -> None:
        """End the calls that still run."""
        if self._channel is not None:
            await self._channel.close()

    async def _forward(
        self, method: str, requests: AsyncIterator[bytes], context: GrpcCall
    ) -> None:
        metadata, timeout_s = self.metadata(context, method), context.remaining_s
        call: Any = self._open().stream_stream(method)(timeout=timeout_s, metadata=metadata)
        sending = asyncio.ensure_future(_send(requests, call))
        try:
            async for response in call:
                await context.write(response)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", _details(error))
        except asyncio.CancelledError:
            late = sending.exception() if sending.done() and not sending.cancelled() else None
            if late is not None:  # the request did not arrive
                raise late from None
            raise
        finally:
            call.cancel()
            sending.cancel()

    def _open(self) -> grpc.aio.Channel:
        if self._address.endswith(":0"):
            raise JobsDisabled("this mesh runs no jobs: set jobs.replicas, or jobs.address")
        if self._channel is None:
            self._channel = open_aio(
                self._address, self._credentials, reconnect_ms_max=RECONNECT_IN_MESH_MS_MAX
            )
        return self._channel


@contextmanager
def errors_of_jobs() -> Iterator[None]:
    """Turn the error with which a process of `jobs` ended a call in the block into a SluiceError."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        _details(error)
        raise error_of(error) from None


async def _send(requests: AsyncIterator[bytes], call: Any) -> None:
    """Send requests on; raise SluiceError, and cancel `call`, if they do not arrive."""
    try:
        with suppress(
            asyncio.InvalidStateError, grpc.aio.AioRpcError
        ):  # the answer came before the end
            async for request in requests:
                if len(request) > MESSAGE_BYTES_MAX:
                    raise MessageTooLarge(
                        f"a message about jobs has {len(request)} bytes, the limit is {MESSAGE_BYTES_MAX}; a file is"
                        " sent in pieces",
                        metadata={
                            "bytes": str(len(request)),
                            "limit_bytes": str(MESSAGE_BYTES_MAX),
                        },
                    )
                await call.write(request)
            await call.done_writing()
    except SluiceError:
        call.cancel()
        raise


def _details(error: grpc.aio.AioRpcError) -> tuple[Any, ...]:
    """Return the details of the error of a process of `jobs`; raise TransportUnavailable if none answered."""
    metadata = error.trailing_metadata() or ()
    details = tuple(entry for entry in metadata if entry[0] == STATUS_DETAILS)
    if not details and error.code() is grpc.StatusCode.UNAVAILABLE:
        raise TransportUnavailable("no process of jobs answers; `sluice status` shows it") from None
    return details
