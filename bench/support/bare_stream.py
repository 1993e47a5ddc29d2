"""A gRPC server that does nothing but stream: the upper bound for any gateway in this language. Prints its port."""

import asyncio
import sys
from collections.abc import AsyncIterator

import grpc
import uvloop

from sluice.v1 import inference_pb2, inference_pb2_grpc

EVENTS = "events"
"""The model that answers as the gateway does: started, one delta and finished in one message."""


class BareService(inference_pb2_grpc.InferenceServiceServicer):
    """Streams max_tokens messages of one token each, or the one message of `EVENTS`."""

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        if request.model == EVENTS:
            usage = inference_pb2.Usage(prompt_tokens=20, completion_tokens=1)
            yield inference_pb2.GenerateResponse(
                started=inference_pb2.Started(request_id="req-0", trace_id="0" * 32, model=EVENTS),
                delta=inference_pb2.Delta(text="word ", token_ids=[0]),
                finished=inference_pb2.Finished(
                    reason=inference_pb2.FINISH_REASON_LENGTH, usage=usage
                ),
            )
            return
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
