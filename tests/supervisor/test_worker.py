import asyncio
import os
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc.aio import InferenceServerClient, InferInput

from model_workers.deploy import REQUEST, render_repository
from sluice.errors import SetupError
from sluice.internal.v1 import worker_pb2
from sluice.settings import Settings
from sluice.startup import free_port
from supervisor.mesh import running_worker
from supervisor.model_processes import first_lost, stub_pids, triton_watcher
from supervisor.plan import plan_triton
from supervisor.specs import triton_spec
from supervisor.supervisor import Supervisor
from supervisor.triton import remove_shared_memory, wait_for_triton

BOUND_S = 60.0


def settings() -> Settings:
    models = [
        {"name": name, "path": "builtin:small", "engine": "echo", "triton_url": "127.0.0.1:1"}
        for name in ("one", "two")
    ]
    return Settings.model_validate({"models": models, "routing": {"default": "one"}})


async def heartbeats(address: str, model: str, count: int) -> list[str]:
    """The worker id in each of the first heartbeats of a new channel."""
    opening = worker_pb2.OpenChannel(batcher="b-test", heartbeat_ms=50)
    message = worker_pb2.WorkerRequest(open_channel=opening).SerializeToString()
    tensor = InferInput(REQUEST, [len(message)], "UINT8")
    tensor.set_data_from_numpy(np.frombuffer(message, dtype=np.uint8))
    done = asyncio.Event()

    async def requests():
        yield {"model_name": model, "inputs": [tensor]}
        await done.wait()

    workers: list[str] = []
    async with asyncio.timeout(BOUND_S), InferenceServerClient(address) as client:
        stream = client.stream_infer(requests())
        async for result, error in stream:
            assert error is None, error
            payload = result.as_numpy("response").tobytes()
            workers.append(worker_pb2.StepReport.FromString(payload).worker)
            if len(workers) == count:
                break
        stream.cancel()
        done.set()
    return workers


@pytest.mark.long
async def test_a_dead_stub_takes_its_server_along(tmp_path: Path) -> None:
    config = plan_triton(settings(), tmp_path, "triton", ("one", "two"), "127.0.0.1", free_port())
    render_repository(settings(), config.repository)
    supervisor = Supervisor()
    try:
        process = supervisor.start(
            triton_spec(config, tmp_path / "log"), triton_watcher(config, BOUND_S)
        )
        await supervisor.during_start(wait_for_triton(config.address, BOUND_S))
        before = stub_pids(supervisor.pids["triton"])
        assert set(before) == {"one_0_0", "two_0_0"}
        (other,) = await heartbeats(config.address, "two", 1)
        os.kill(before["one_0_0"], signal.SIGKILL)
        await supervisor.wait_for(lambda: process.restarts == 1, BOUND_S)
        await wait_for_triton(config.address, BOUND_S)
        for pid in before.values():
            async with asyncio.timeout(BOUND_S):
                await first_lost([pid])
        assert len(set(await heartbeats(config.address, "one", 3))) == 1
        assert await heartbeats(config.address, "two", 1) != [other]
    finally:
        await supervisor.stop()
    assert remove_shared_memory(config.shm_prefix) == 0


@pytest.mark.long
async def test_a_worker_alone() -> None:
    port = free_port()
    async with running_worker(settings(), "127.0.0.1", port) as address:
        assert address == f"127.0.0.1:{port}"
        assert await heartbeats(address, "two", 1)


async def test_a_port_that_is_in_use_is_named() -> None:
    held = socket.create_server(("127.0.0.1", 0))
    with held, pytest.raises(SetupError, match=r"^triton\.port: .* is in use"):
        async with running_worker(settings(), "127.0.0.1", held.getsockname()[1]):
            pass


async def test_a_triton_that_is_not_there_is_named() -> None:
    with pytest.raises(SetupError, match=r"^--tritonserver none-such: "):
        async with running_worker(settings(), "127.0.0.1", free_port(), "none-such"):
            pass


async def test_a_worker_without_a_model_of_its_own_says_what_to_run() -> None:
    server = {"url": "http://127.0.0.1:1/v1", "model": "m"}
    one = {"name": "gpt", "path": "builtin:small", "engine": "openai", "server": server}
    remote = Settings.model_validate({"models": [one], "routing": {"default": "gpt"}})
    with pytest.raises(SetupError, match=r"model_workers\.remote .*--model gpt"):
        async with running_worker(remote, "127.0.0.1", free_port()):
            pass
