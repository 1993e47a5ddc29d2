"""A gRPC server that does nothing but stream: the upper bound for any gateway in this language. Prints its port."""

import asyncio
import sys
from collections.abc import AsyncIterator

import grpc
import uvloop

from sluice.v1 import inference_pb2, inference_pb2_grpc


class BareService(inference_pb2_grpc.InferenceServiceServicer):
    """Streams max_tokens messages of one token each."""

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        for index in range(request.sampling.max_tokens):
            yield inference_pb2.GenerateResponse(
                delta=inference_pb2.Delta(text="word ", token_ids=[index], index=index)
            )


async def serve() -> None:
    """Serves until the parent closes standard input."""
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(BareService(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    uvloop.run(serve())
