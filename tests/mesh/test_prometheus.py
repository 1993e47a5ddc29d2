"""A real Prometheus scrapes a running mesh, and all rules have values or none, but no faults."""

import asyncio
import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.support.meshes import echo
from sluice.client import AsyncClient
from sluice.settings import GatewaySettings, JobsSettings, TelemetrySettings
from sluice.startup import free_port
from sluice.v1 import jobs_pb2
from supervisor.mesh import running_mesh
from tests.compose.test_prometheus import DASHBOARDS, queries
from tests.mesh.test_traces import ask
from tests.support.compose import FOLDER
from tests.support.mesh import RunningMesh, quick_settings
from tests.support.nats import end

pytestmark = [pytest.mark.mesh, pytest.mark.long]

WAIT_S = 60.0
STOP_S = 60.0


@asynccontextmanager
async def prometheus(folder: Path, targets: list[str]) -> AsyncIterator[str]:
    """The address of a Prometheus that scrapes ``targets`` every second."""
    if shutil.which("prometheus") is None:
        pytest.skip("no Prometheus here: apt-get install prometheus")
    configuration = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    (scrape,) = configuration["scrape_configs"]
    del scrape["dns_sd_configs"]
    scrape["static_configs"] = [{"targets": targets}]
    configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    shutil.copy(FOLDER / "prometheus.rules.yaml", folder)
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yaml"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
    process = start(command, folder / "prometheus.log")
    try:
        yield address
    finally:
        await asyncio.to_thread(end, process, STOP_S)


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


def check(page: bytes) -> subprocess.CompletedProcess[bytes]:
    command = ["promtool", "check", "metrics"]
    return subprocess.run(command, input=page, capture_output=True, timeout=60)


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as response:
        return bytes(response.read())


def get(address: str, path: str, **parameters: str) -> Any:
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.load(response)["data"]


async def values(address: str, query: str, count: int) -> list[float]:
    """The values of a query once it has ``count`` series."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                found = (await asyncio.to_thread(get, address, "query", query=query))["result"]
            except OSError:  # it starts
                found = []
            if len(found) >= count:
                return [float(one["value"][1]) for one in found]
            await asyncio.sleep(0.2)


async def test_prometheus_reads_every_page_and_every_rule(
    mesh: RunningMesh, tmp_path: Path
) -> None:
    pages = mesh.settings.telemetry.prometheus
    targets = [page for page in (pages["gateway"], pages["batcher"], pages["jobs"]) if page]
    async with prometheus(tmp_path, targets) as address:
        assert await values(address, "up == 1", len(targets)) == [1.0] * len(targets)
        await ask(mesh, "classify: the lid is cracked")
        for query in (
            "sluice_requests_total",
            "gen_ai_server_time_to_first_token_seconds_bucket",
            "worker:sluice_live:max == 1",
            "model:sluice_queue_tasks:sum",
            "sluice_jobs_running",
        ):
            assert await values(address, query, 1)
        groups = (await asyncio.to_thread(get, address, "rules"))["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert {
            rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"
        } == {}
        firing = [rule["name"] for rule in rules if rule.get("state") == "firing"]
        assert firing == []
    for target in targets:
        page = await asyncio.to_thread(read, f"http://{target}/metrics")
        checked = await asyncio.to_thread(check, page)
        assert (checked.returncode, checked.stderr) == (0, b""), target


KEDA = yaml.safe_load((FOLDER / "kubernetes" / "keda" / "scaledobject.yaml").read_text())
BULK = yaml.safe_load((FOLDER / "kubernetes" / "keda-bulk" / "bulk.yaml").read_text())
LINES = "\n".join(
    json.dumps({"prompt": f"{number} " + "w " * 20, "max_tokens": 40}) for number in range(4000)
)
"""More items than a job has in flight."""
LOADED = quick_settings(
    echo(4, echo_step_ms=50.0),
    gateway=GatewaySettings(address="127.0.0.1:0", drain_s=2.0, max_concurrent_requests=4096),
    jobs=JobsSettings(window_items=4096),
    telemetry=TelemetrySettings(
        prometheus={"gateway": "127.0.0.1:0", "batcher": "127.0.0.1:0", "jobs": "127.0.0.1:0"}
    ),
)
"""A worker with few slots, and a batcher with room for few rows of a gateway: others wait there."""
AFTER_EVENTS = re.compile(
    "dead_letters|rows_resent|recoveries|escalations|cached_answers|cost_total|drift|accuracy_bias"
    "|jobs_items|safety_actions|span_exported|requests_refused|prediction_error|errors:ratio|outcome=|degraded="
)
"""Metrics and labels without a value before something happens that does not happen here."""


async def test_autoscaler_sees_a_running_job_in_its_bulk_trigger_alone(tmp_path: Path) -> None:
    async with running_mesh(LOADED) as mesh, AsyncClient(mesh.address) as client:
        pages = mesh.settings.telemetry.prometheus
        targets = [page for page in (pages["gateway"], pages["batcher"], pages["jobs"]) if page]
        async with prometheus(tmp_path, targets) as address:
            await asked(client)
            upload = await client.jobs.upload("in.jsonl", lambda: [LINES.encode()])
            spec = jobs_pb2.JobSpec(model="echo", input=jobs_pb2.JobInput(upload_id=upload))
            job = await client.jobs.create(spec, "")
            (queue, first_token), bulk = KEDA["spec"]["triggers"], BULK[0]["value"]
            async with asyncio.timeout(WAIT_S):
                while True:
                    pending = await values(address, bulk["metadata"]["query"], 1)
                    (waiting,) = await values(address, "sum(sluice_room_waiting)", 1)
                    (queued,) = await values(address, "sum(sluice_queue_tasks)", 1)
                    is_high = pending[0] > float(bulk["metadata"]["threshold"])
                    if is_high and min(waiting, queued) > 0:
                        break
            assert await values(address, queue["metadata"]["query"], 1) == [0.0]
            await values(address, first_token["metadata"]["query"], 1)
            for path in DASHBOARDS.values():
                for query in queries(json.loads(path.read_text())):
                    if not AFTER_EVENTS.search(query):
                        asks = query.replace("$__rate_interval", "5m").replace("$model", ".*")
                        assert await values(address, asks, 1)
            await client.jobs.cancel(job.id)


async def asked(client: AsyncClient) -> None:
    async with client.generate("w " * 20, max_tokens=40, timeout_s=600) as stream:
        async for _ in stream:
            pass
