"""A busy loop gets the events of gRPC together. In a process of its own: the first user of grpc.aio decides."""

import subprocess
import sys

SCRIPT = """
import asyncio, time
import grpc
from sluice.grpc_events import prompt_grpc_events

CALLS = 1000

async def _ended(call):
    try:
        await call
    except grpc.aio.AioRpcError:
        pass

async def main():
    with prompt_grpc_events():
        # Nobody listens: all calls fail at the same moment.
        async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
            call = channel.unary_unary("/no.Such/Method")
            calls = [asyncio.ensure_future(_ended(call(b"", timeout=60))) for _ in range(CALLS)]
            turns = 0
            while not all(one.done() for one in calls):
                turns += 1
                time.sleep(0.005)  # others use the loop
                await asyncio.sleep(0)
    print(turns)

asyncio.run(main())
"""


def test_a_thousand_calls_take_no_turn_of_the_loop_each() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) < 400, done
