"""Server reflection, v1 and v1alpha (https://github.com/grpc/grpc/blob/master/doc/server-reflection.md).

grpcio-reflection serves v1alpha alone. Both versions have the same messages, so one servicer answers both.
"""

from collections.abc import Sequence
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import Default, DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as V1ALPHA
from grpc_reflection.v1alpha.reflection import aio

V1: Final = "grpc.reflection.v1.ServerReflection"


class _MethodPool:
    """The default descriptor pool, which also finds methods by their full name: ghz asks for them."""

    def __init__(self, pool: DescriptorPool) -> None:
        self._pool = pool

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        """Raises KeyError for a symbol that no file declares."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service, _, method = symbol.rpartition(".")
            return (
                self._pool.FindServiceByName(service)
                .methods_by_name[method]
                .containing_service.file
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def add_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Lets clients of ``server`` ask for the descriptors of ``services``, full names."""
    servicer = aio.ReflectionServicer((*services, V1, V1ALPHA), pool=_MethodPool(Default()))
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for version in (V1, V1ALPHA):
        handler = grpc.method_handlers_generic_handler(version, {"ServerReflectionInfo": method})
        server.add_generic_rpc_handlers((handler,))
