"""The quiet tenant of `abuse`, in a process of its own: small interactive calls by Poisson arrivals.

    python -m tests.robustness.quiet_caller GRPC CALLS_A_SECOND     its key, or "", is the first line of the input

It ends with its standard input. Its output is a JSON list of calls: when each was due by `time.monotonic`, in seconds;
from then to its begin, its first token and its end, in milliseconds; and its error, or "".
"""

import asyncio
import json
import random
import sys
import time
from typing import Any, Final

import grpc
import uvloop

from sluice.v1 import inference_pb2 as pb
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from tests.robustness.attacks import MODEL

CALL_S: Final = 10.0
TOKENS: Final = 4
SEED: Final = 29

Call = tuple[float, float, float, float, str]


async def ask(stub: Any, key: str, due: float, number: int) -> Call:
    """Ask once; a call without a first token has the time of its end."""
    late_ms = first_ms = 1000 * (time.monotonic() - due)
    sampling = pb.SamplingParams(max_tokens=TOKENS)
    request = pb.GenerateRequest(prompt=f"one two {number}", model=MODEL, sampling=sampling)
    metadata = (("authorization", f"Bearer {key}") if key else ("sluice-tenant", "interactive"),)
    call = stub.Generate(request, timeout=CALL_S, metadata=metadata)
    failed = ""
    try:
        async for event in call:
            if event.HasField("delta") and first_ms == late_ms:
                first_ms = 1000 * (time.monotonic() - due)
    except grpc.aio.AioRpcError as error:
        failed = f"{error.code().name}: {(error.details() or '')[:100]}"
    finally:
        call.cancel()
    return due, late_ms, first_ms, 1000 * (time.monotonic() - due), failed


async def quiet(address: str, per_s: float, key: str) -> list[Call]:
    """Ask until the standard input ends."""
    chance, calls = random.Random(SEED), []
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    async with grpc.aio.insecure_channel(address) as channel, asyncio.TaskGroup() as group:
        stub: Any = InferenceServiceStub(channel)
        due = time.monotonic()
        while not ended.done():
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            calls.append(group.create_task(ask(stub, key, due, len(calls))))
            due += chance.expovariate(per_s)
    return [call.result() for call in calls]


if __name__ == "__main__":
    where, how_often = sys.argv[1:]
    said = sys.stdin.readline().strip()
    print(json.dumps(uvloop.run(quiet(where, float(how_often), said))))
