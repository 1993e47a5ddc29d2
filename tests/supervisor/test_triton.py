import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from grpc import StatusCode, aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from sluice.errors import SetupError
from sluice.startup import free_port
from supervisor.child import Child, ChildSpec
from supervisor.model_processes import stub_pids, until_lost
from supervisor.specs import triton_spec
from supervisor.triton import (
    TritonConfig,
    find_libpython,
    find_wheel,
    prepare_runtime,
    remove_shared_memory,
    triton_command,
    triton_environment,
    wait_for_triton,
)

REPOSITORY = Path(__file__).with_name("repository")
MODEL = "echo_probe"
SECRET = "not-for-everybody"
READY_S = 60.0
BOUND_S = 60.0


@dataclass(frozen=True)
class Running:
    child: Child
    client: InferenceServerClient
    stub: service_pb2_grpc.GRPCInferenceServiceStub
    config: TritonConfig


@pytest.fixture
def config(tmp_path: Path) -> Iterator[TritonConfig]:
    prepare_runtime(tmp_path / "runtime")
    config = TritonConfig(
        name="triton",
        repository=REPOSITORY,
        models=(MODEL,),
        runtime=tmp_path / "runtime",
        port=free_port(),
        secret=SECRET,
        exit_timeout_s=2,
        shm_prefix=f"sluice_test_{os.getpid()}_",
    )
    yield config
    remove_shared_memory(config.shm_prefix)


@asynccontextmanager
async def running(config: TritonConfig) -> AsyncIterator[Running]:
    log = config.runtime / "triton.log"
    env = triton_environment(config.runtime)
    child = Child(ChildSpec("triton", triton_command(config), env=env, log=log))
    address = f"{config.host}:{config.port}"
    try:
        await wait_for_triton(address, READY_S)
        async with (
            InferenceServerClient(address) as client,
            aio.insecure_channel(address) as channel,
        ):
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            yield Running(child, client, stub, config)
    finally:
        await child.end(10.0)


async def ask(running: Running, payload: bytes, *, hold: bool = False) -> AsyncIterator[bytes]:
    """The payload of each response to one request. By the generated stub: it tells when the last one came."""
    request = service_pb2.ModelInferRequest(model_name=MODEL, raw_input_contents=[payload])
    request.inputs.add(name="request", datatype="UINT8", shape=[len(payload)])
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    if hold:
        request.parameters["hold"].int64_param = 1
    call = running.stub.ModelStreamInfer(metadata=(("triton_grpc_error", "true"),))
    try:
        await call.write(request)
        async for message in call:
            # What is refused before it reaches a model stays inside the stream.
            assert not message.error_message, message.error_message
            response = message.infer_response
            for content in response.raw_output_contents:
                yield content
            if response.parameters["triton_final_response"].bool_param:
                # As the batcher does. When a stream is cancelled right after its last response, Triton 2.51 sometimes
                # never unloads the model and ends with 1 after its exit timeout.
                await call.done_writing()
    finally:
        call.cancel()


async def answers(running: Running, payload: bytes) -> list[bytes]:
    async with asyncio.timeout(BOUND_S):
        return [content async for content in ask(running, payload)]


def test_runtime_folder_links_to_the_wheel_and_this_python(tmp_path: Path) -> None:
    for _ in range(2):  # a second time changes nothing
        prepare_runtime(tmp_path)
        stub = tmp_path / "backends" / "python" / "triton_python_backend_stub"
        assert stub.resolve() == find_wheel().stub.resolve()
        [library] = (tmp_path / "lib").iterdir()
        assert library.resolve() == find_libpython()


def test_a_missing_wheel_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(SetupError, match="pip install nvidia-pytriton"):
        find_wheel()


def test_a_runtime_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="choose a folder"):
        prepare_runtime(tmp_path / "file")


def test_spans_and_metrics_only_where_asked_for(config: TritonConfig) -> None:
    words = " ".join(triton_command(config))
    assert "--trace-config" not in words
    assert "--allow-metrics=false" in words
    asked = TritonConfig(
        "triton", REPOSITORY, (MODEL,), config.runtime, 1, SECRET, otlp_endpoint="http://h:3/"
    )
    words = " ".join(triton_command(asked))
    assert "opentelemetry,url=http://h:3/v1/traces" in words
    assert "service.name=sluice-triton" in words


def test_the_environment_keeps_what_is_not_its_own(tmp_path: Path) -> None:
    base = {"HOME": "/h", "PYTHONHOME": "/other", "LD_LIBRARY_PATH": "/cuda", "PATH": "/bin"}
    environment = triton_environment(tmp_path, base)
    assert environment["HOME"] == "/h"
    assert "PYTHONHOME" not in environment
    assert environment["LD_LIBRARY_PATH"] == f"{tmp_path}/lib:/cuda"
    assert environment["PATH"].endswith(":/bin")
    assert environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    own = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    assert triton_environment(tmp_path, own)["GLIBC_TUNABLES"] == own["GLIBC_TUNABLES"]


def secret_header(secret: str) -> dict[str, str]:
    return {"triton-grpc-protocol-sluice-secret": secret}


async def test_restricted_calls_need_the_secret(config: TritonConfig) -> None:
    async with running(config) as triton_:
        client = triton_.client
        for call in (
            client.get_model_repository_index,
            client.get_inference_statistics,
            client.get_log_settings,
            client.get_trace_settings,
            client.get_system_shared_memory_status,
        ):
            with pytest.raises(InferenceServerException, match="restricted"):
                await call()
            await call(headers=secret_header(SECRET))
        with pytest.raises(InferenceServerException, match="restricted"):
            await client.unload_model(MODEL, headers=secret_header("wrong"))


async def test_a_server_whose_stub_died_goes_on_without_its_model(config: TritonConfig) -> None:
    async with running(config) as triton_:
        [(instance, stub)] = stub_pids(triton_.child.pid).items()
        assert instance == f"{MODEL}_0_0"
        watching = asyncio.create_task(until_lost(triton_.child, config, READY_S))
        os.kill(stub, signal.SIGKILL)
        await asyncio.wait_for(watching, BOUND_S)
        assert stub_pids(triton_.child.pid) == {}
        with pytest.raises(aio.AioRpcError, match="not healthy"):
            await answers(triton_, b"lost")


@pytest.mark.parametrize("server", [False, True])
async def test_a_stopped_process_is_noticed(config: TritonConfig, server: bool) -> None:
    async with running(config) as triton_:
        [stub] = stub_pids(triton_.child.pid).values()
        stopped = triton_.child.pid if server else stub
        watching = asyncio.create_task(until_lost(triton_.child, config, READY_S))
        try:
            assert await answers(triton_, b"before") == [b"before"]
            os.kill(stopped, signal.SIGSTOP)
            await asyncio.wait_for(watching, BOUND_S)
        finally:
            os.kill(stopped, signal.SIGCONT)


async def test_a_killed_server_is_noticed_at_once_and_nothing_is_left(config: TritonConfig) -> None:
    async with running(config) as triton_, asyncio.timeout(BOUND_S):
        held = ask(triton_, b"open", hold=True)
        await anext(held)
        os.kill(triton_.child.pid, signal.SIGKILL)
        with pytest.raises(aio.AioRpcError) as error:
            await anext(held)
        assert error.value.code() is StatusCode.UNAVAILABLE
        await triton_.child.exited
    assert stub_pids(triton_.child.pid) == {}
    assert remove_shared_memory(config.shm_prefix) == 1
    assert remove_shared_memory(config.shm_prefix) == 0


async def test_nothing_of_a_state_directory_reaches_a_shell(tmp_path: Path) -> None:
    root = tmp_path / "a b'ü\"$HOME;touch one&touch two:`touch three`"
    shutil.copytree(REPOSITORY, root / "models" / "w")
    planned = TritonConfig(
        name="triton",
        repository=root / "models" / "w",
        models=(MODEL,),
        runtime=root / "triton",
        port=free_port(),
        secret=SECRET,
        exit_timeout_s=2,
        shm_prefix=f"sluice_test_{os.getpid()}_",
    )
    child = Child(triton_spec(planned, tmp_path / "triton.log"))
    try:
        await wait_for_triton(planned.address, READY_S)
        [stub] = stub_pids(child.pid).values()
        assert str(tmp_path) not in " ".join(psutil.Process(stub).cmdline())
    finally:
        await child.end(0.5)
        remove_shared_memory(planned.shm_prefix)
