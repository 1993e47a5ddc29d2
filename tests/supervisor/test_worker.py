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
from supervisor.mesh import running_worker, triton_watcher
from supervisor.plan import plan_triton, triton_spec
from supervisor.state import is_same_process
from supervisor.supervisor import Supervisor
from supervisor.triton import remove_shared_memory, wait_for_triton
from supervisor.triton_stubs import Action, control_model, stub_pids

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
            workers.append(worker_pb2.WorkerResponse.FromString(payload).step.worker)
            if len(workers) == count:
                break
        stream.cancel()
        done.set()
    return workers


@pytest.mark.long
async def test_a_dead_stub_comes_back_and_the_others_go_on(tmp_path: Path) -> None:
    here = settings().model_copy(
        update={
            "models": tuple(m.model_copy(update={"triton_url": None}) for m in settings().models)
        }
    )
    config = plan_triton(here, tmp_path, "127.0.0.1", free_port())
    address = f"127.0.0.1:{config.port}"
    render_repository(here, config.repository)
    supervisor = Supervisor()
    try:
        process = supervisor.start(
            triton_spec(config, tmp_path / "log"), triton_watcher(config, here)
        )
        await supervisor.during_start(wait_for_triton(address, BOUND_S))
        server = supervisor.pids["triton"]
        before = stub_pids(server)
        assert set(before) == {"one_0_0", "two_0_0"}
        (other,) = await heartbeats(address, "two", 1)
        os.kill(before["one_0_0"], signal.SIGKILL)
        await supervisor.wait_for(lambda: process.reloads == 1, BOUND_S)
        after = stub_pids(server)
        assert after["one_0_0"] != before["one_0_0"]
        assert after["two_0_0"] == before["two_0_0"]
        assert supervisor.pids["triton"] == server
        assert len(set(await heartbeats(address, "one", 3))) == 1
        assert await heartbeats(address, "two", 1) == [other]
        problem = await control_model(address, config.secret, "none", Action.LOAD, BOUND_S)
        assert problem is not None
        assert "none" in problem
        problem = await control_model(address, "wrong", "one", Action.UNLOAD, BOUND_S)
        assert problem is not None

        os.kill(server, signal.SIGKILL)
        await supervisor.wait_for(lambda: process.life.restarts == 1, BOUND_S)
        await wait_for_triton(address, BOUND_S)
        assert not any(is_same_process(pid, None) for pid in after.values())
        (again,) = await heartbeats(address, "two", 1)
        assert again != other
    finally:
        await supervisor.stop()
    assert remove_shared_memory(config.shm_prefix) == 0


async def test_a_worker_alone() -> None:
    port = free_port()
    async with running_worker(settings(), "127.0.0.1", port) as address:
        assert address == f"127.0.0.1:{port}"
        assert await heartbeats(address, "two", 1)
    held = socket.create_server(("127.0.0.1", port))
    with held, pytest.raises(SetupError, match=r"^triton\.port: .* is in use"):
        async with running_worker(settings(), "127.0.0.1", port):
            pass
