"""``sluice.v1.JobService`` of a gateway: each call goes on to a process of `jobs`, its messages unread."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from gateway.admission.call import Call
from gateway.api.grpc_call import GrpcCall
from gateway.identity.caller import JOB_READS, MESH
from sluice.client.channel import (
    RECONNECT_IN_MESH_MS_MAX,
    error_of,
    open_aio,
)
from sluice.defaults import ALL_TENANTS_METADATA, KEY_METADATA, TENANT_METADATA
from sluice.errors import (
    RETRY_AFTER_S,
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
"""Of one message; a process of jobs takes a specification of 64 KiB, and pieces of a file of 512 KiB."""
_TRACE: Final = re.compile(r"[0-9a-f-]{55,128}")


class JobForwarder(grpc.GenericRpcHandler):
    """Passes calls on. To HTTP/2 each of them is a stream of messages in both directions."""

    def __init__(
        self, settings: JobsSettings, mesh_key: Callable[[], str | None], tls: Path | None = None
    ) -> None:
        """``mesh_key``: signs what is sent (None: nothing does); ``tls``: folder of the certificate that is shown."""
        self._address = settings.address
        self._mesh_key = mesh_key
        self._credentials = channel_credentials(tls)
        self._channel: grpc.aio.Channel | None = None

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a method of JobService."""
        method = str(handler_call_details.method)
        if not method.startswith(f"/{JOB_SERVICE}/"):
            return None
        return grpc.stream_stream_rpc_method_handler(partial(self._forward, method))

    def begin(self, asked_by: Call, method: str, *request: Message, wait_s: float) -> Any:
        """Begins a call of our own for ``asked_by``; in a block of `errors_of_jobs`.

        Raises:
            JobsDisabled: there is nobody to call.
        """
        call = getattr(JobServiceStub(self._open()), method)
        return call(*request, metadata=self.metadata(asked_by), timeout=wait_s)

    def metadata(self, call: Call, method: str = "") -> tuple[tuple[str, str], ...]:
        """What a process of `jobs` is told of ``call``.

        A process of the mesh, or anybody where nobody is asked, calls for one tenant. ``method``: its caller may see
        the jobs of other tenants where its role lets it call this one for them; unset: not.
        """
        caller = call.caller
        identity = {TENANT_METADATA: caller.tenant}
        scope = caller.reads if method in JOB_READS else caller.changes
        if caller.key_id:
            identity[KEY_METADATA] = caller.key_id
        if method and scope is None and MESH not in caller.roles:
            identity[ALL_TENANTS_METADATA] = "1"
        trace = call.metadata.get(TRACEPARENT, "")
        # A header of HTTP may have characters that metadata cannot; a trace context has none of them.
        traced = ((TRACEPARENT, trace),) if _TRACE.fullmatch(trace) else ()
        return (*signed(identity, self._mesh_key()), *traced)

    async def close(self) -> None:
        """Ends what still runs."""
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
    """An error with which a process of `jobs` ended a call becomes SluiceError."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        _details(error)
        raise error_of(error) from None


async def _send(requests: AsyncIterator[bytes], call: Any) -> None:
    """Passes requests on; raises SluiceError, and has cancelled ``call``, when they do not arrive."""
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
    """What a process of `jobs` says of its error; raises TransportUnavailable where it is of none."""
    found = tuple(one for one in error.trailing_metadata() or () if one[0] == STATUS_DETAILS)
    if not found and error.code() is grpc.StatusCode.UNAVAILABLE:
        raise TransportUnavailable(
            "no process of jobs answers; `sluice status` shows it", retry_after_s=RETRY_AFTER_S
        ) from None
    return found
