"""The examples of examples/batch are what their tools read; the commands in them are commands of `sluice batch`."""

import ast
import asyncio
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from cli.batch import batch
from sluice.v1 import jobs_pb2
from tests.support.scripted_jobs import ScriptedJobs, answered

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/batch"
BOUND_S: Final = 300.0
ANSWERS: Final = (answered(0, "3 7 12"), answered(1, "1 4 9"))
AIRFLOW: Final = os.environ.get("SLUICE_AIRFLOW", "")
PREFECT: Final = os.environ.get("SLUICE_PREFECT", "")
"""Pythons with them: each wants versions of its own of dozens of packages, so each has an environment of its own."""


@pytest.mark.parametrize(
    "name", ["Makefile", "airflow_dag.py", "cronjob.yaml", "sluice-batch.service"]
)
def test_options_in_examples_are_options_of_the_command(name: str) -> None:
    _, _, line = (EXAMPLES / name).read_text().partition("sluice batch submit ")
    submit = get_command(batch).commands["submit"]  # type: ignore[attr-defined]
    known = {option for parameter in submit.params for option in parameter.opts}
    used = set(re.findall(r"(?<= )--[a-z-]+", line))
    assert {"--key", "--model"} <= used <= known


def test_the_cron_job_is_valid() -> None:
    manifest = yaml.safe_load((EXAMPLES / "cronjob.yaml").read_text())
    kubernetes_validate.validate(manifest, "1.33", strict=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_units_are_valid() -> None:
    units = [str(EXAMPLES / f"sluice-batch.{kind}") for kind in ("service", "timer")]
    ran = subprocess.run(
        ["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=30
    )
    said = [line for line in ran.stderr.splitlines() if "sluice-batch" in line]
    assert not said, said
    calendar = ["systemd-analyze", "calendar", "*-*-* 02:00:00 UTC"]
    assert subprocess.run(calendar, capture_output=True, timeout=60).returncode == 0


async def ran(command: Sequence[str | Path], address: str, **environment: str) -> str:
    """What a program prints that ends well; it finds `sluice`, and the gateway at ``address``."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = await asyncio.to_thread(
        subprocess.run,
        command,
        env={**os.environ, "PATH": path, "SLUICE_ADDRESS": address, **environment},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
async def test_make_submits_once_for_each_state_of_the_prompts(tmp_path: Path) -> None:
    for name in ("Makefile", "prompts.jsonl"):
        shutil.copy(EXAMPLES / name, tmp_path)
    make = ["make", "-C", str(tmp_path)]
    async with ScriptedJobs(found=ANSWERS).serve() as jobs:
        await ran(make, jobs.address)
        assert "up to date" in await ran(make, jobs.address)
    (request,) = jobs.created
    prompts = (tmp_path / "prompts.jsonl").read_bytes()
    assert request.idempotency_key == hashlib.sha256(prompts).hexdigest()[:32]
    assert jobs.uploads == {"prompts.jsonl": prompts}
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2


@pytest.mark.long
@pytest.mark.skipif(not PREFECT, reason="SLUICE_PREFECT names no Python with Prefect")
async def test_prefect_runs_the_flow(tmp_path: Path) -> None:
    command = [PREFECT, EXAMPLES / "prefect_flow.py", "s3://prompts/a.jsonl", "nightly"]
    home = {
        "PREFECT_HOME": str(tmp_path),
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": f"{BOUND_S / 2:g}",
        "DO_NOT_TRACK": "1",
        "PYTHONPATH": str(ROOT),
    }
    async with ScriptedJobs(found=ANSWERS).serve() as jobs:
        said = await ran(command, jobs.address, **home)
    (request,) = jobs.created
    assert (request.idempotency_key, request.spec.input.url) == ("nightly", "s3://prompts/a.jsonl")
    assert said.splitlines()[-1] == "2"


@pytest.mark.long
@pytest.mark.skipif(not AIRFLOW, reason="SLUICE_AIRFLOW names no Python with Airflow")
async def test_airflow_runs_the_dag(tmp_path: Path) -> None:
    dags, out = tmp_path / "dags", tmp_path / "answers-2026-01-02.jsonl"
    dags.mkdir()
    home = {
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    }
    async with ScriptedJobs(found=ANSWERS).serve() as jobs:
        text = (EXAMPLES / "airflow_dag.py").read_text()
        text = text.replace("gateway:50051", jobs.address).replace("/data/", f"{tmp_path}/")
        (dags / "nightly.py").write_text(text)
        await ran([AIRFLOW, "-m", "airflow", "db", "migrate"], jobs.address, **home)
        test = ("dags", "test", "nightly_answers", "2026-01-02")
        await ran([AIRFLOW, "-m", "airflow", *test], jobs.address, **home)
    (request,) = jobs.created
    assert request.idempotency_key == "nightly-2026-01-02"
    assert request.spec.input.url == "s3://prompts/2026-01-02.jsonl"
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize("name", ["airflow_dag.py", "prefect_flow.py"])
def test_programs_use_what_the_client_has(name: str) -> None:
    tree = ast.parse((EXAMPLES / name).read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "pb"
    }
    assert all(hasattr(jobs_pb2, one) for one in used)
