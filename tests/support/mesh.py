"""One embedded mesh for the whole suite, with a receiver of its traces.

It runs on a loop and a thread of its own: pytest gives every test a fresh loop, and the supervisor's must turn all the
time. Tests that kill processes or need other settings start a mesh of their own with `running_mesh`.
"""

import asyncio
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from bench.support.meshes import environment as environment
from bench.support.meshes import mesh_settings
from sluice.client import AsyncClient
from sluice.settings import (
    BatcherSettings,
    GatewaySettings,
    HttpSettings,
    JobsSettings,
    ModelSettings,
    Settings,
    TelemetrySettings,
    TritonSettings,
)
from sluice.settings.routing import CascadeRoute, RoutingPolicy, Selection
from supervisor.mesh import Mesh, running_mesh
from supervisor.model_processes import stub_pids
from supervisor.plan import TRITON, is_worker
from tests.support.otlp import OtlpReceiver, otlp_receiver

START_S: Final = 170.0
STOP_S: Final = 60.0


@dataclass(frozen=True)
class RunningMesh:
    """The suite's mesh.

    Attributes:
        address: of the gateway.
        http: of its HTTP API.
        settings: with every address filled in.
        otlp: all spans of all its processes.
    """

    address: str
    http: str
    settings: Settings
    otlp: OtlpReceiver


def kill(mesh: Mesh, name: str) -> int:
    """Kills a running process of ``mesh``; returns its pid. The supervisor starts it again."""
    child = mesh.supervisor.process(name).child
    assert child is not None, f"{name} does not run now"
    child.send(signal.SIGKILL)
    return child.pid


def stubs_of(mesh: Mesh) -> dict[str, int]:
    """Pids of the Python processes of the embedded models, by worker."""
    servers = {name: pid for name, pid in mesh.supervisor.pids.items() if is_worker(name)}
    return {
        name.removeprefix(f"{TRITON}-"): stub
        for name, pid in servers.items()
        for stub in stub_pids(pid).values()
    }


async def until_counted(client: AsyncClient, metric: str, model: str) -> None:
    """Returns when ``metric`` is above 0 for ``model`` in some process of the mesh."""
    async with asyncio.timeout(START_S):
        while not await counted(client, metric, model):
            pass


async def counted(client: AsyncClient, metric: str, model: str) -> bool:
    found = await client.metrics(metric)
    series = [each for process in found.processes for each in process.metrics]
    points = [point for each in series for point in each.points]
    return any(point.value and model in point.labels for point in points)


CASCADE: Final = {"route": "cascade"}
"""Labels of a request that the small tier answers, and the large one where that is in doubt."""
_ROUTING: Final = Settings.model_fields["routing"].default.model_copy(
    update={
        "policies": {
            "cascade": RoutingPolicy(
                cascade=CascadeRoute(
                    first="small",
                    second="large",
                    commit_tokens=12,
                    min_logprob=-0.05,
                )
            )
        },
        "select": (Selection(policy="cascade", labels=CASCADE),),
    }
)


def small_settings(otlp_http_endpoint: str | None = None) -> Settings:
    """Both shipped tiers and an echo model, few slots, free ports, spans sent soon."""
    return Settings(
        models=(
            ModelSettings(
                name="small", tier="small", path="builtin:small", slots=16, dtype="float32"
            ),
            ModelSettings(
                name="large", tier="large", path="builtin:large", slots=8, dtype="float32"
            ),
            ModelSettings(name="echo", tier="echo", path="builtin:small", engine="echo", slots=64),
        ),
        routing=_ROUTING,
        gateway=GatewaySettings(address="127.0.0.1:0", drain_s=2.0),
        http=HttpSettings(address="127.0.0.1:0"),
        batcher=BatcherSettings(drain_s=2.0),
        triton=TritonSettings(start_s=150.0),
        telemetry=TelemetrySettings(
            otlp_http_endpoint=otlp_http_endpoint,
            prometheus={"gateway": "127.0.0.1:0", "batcher": "127.0.0.1:0", "jobs": "127.0.0.1:0"},
        ),
    )


def quick_settings(*models: ModelSettings, **sections: Any) -> Settings:
    """A mesh of a test's own, which ends soon; without jobs and HTTP unless ``sections`` have them."""
    quick = {
        "gateway": GatewaySettings(address="127.0.0.1:0", drain_s=1.0),
        "batcher": BatcherSettings(drain_s=1.0),
        "jobs": JobsSettings(replicas=0),
    }
    return mesh_settings(*models, **(quick | sections))


@contextmanager
def mesh_on_a_thread() -> Iterator[RunningMesh]:
    """The mesh with `small_settings`, ready when the block begins and gone when it ends."""
    ready: Future[RunningMesh] = Future()
    stop = threading.Event()
    thread = threading.Thread(target=_run, args=(ready, stop), name="mesh")
    thread.start()
    try:
        yield ready.result(START_S)
    finally:
        stop.set()
        thread.join(STOP_S)
        assert not thread.is_alive(), "the mesh did not stop"


def _run(ready: Future[RunningMesh], stop: threading.Event) -> None:
    try:
        asyncio.run(_serve(ready, stop))
    except BaseException as error:
        if ready.done():
            raise
        ready.set_exception(error)


async def _serve(ready: Future[RunningMesh], stop: threading.Event) -> None:
    async with otlp_receiver() as receiver:
        exported = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.grpc_endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }
        with environment(exported):
            settings = small_settings(receiver.http_endpoint)
            async with running_mesh(settings) as mesh:
                assert mesh.http is not None
                running = RunningMesh(mesh.address, mesh.http, mesh.settings, receiver)
                ready.set_result(running)
                await asyncio.to_thread(stop.wait)
