"""The examples of examples/batch are what their tools read; the commands in them are commands of `sluice batch`."""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from sluice.cli.batch import batch
from sluice.v1 import jobs_pb2

EXAMPLES = Path(__file__).parents[2] / "examples/batch"


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


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_submits_once_for_each_state_of_the_prompts(tmp_path: Path) -> None:
    for name in ("Makefile", "prompts.jsonl"):
        shutil.copy(EXAMPLES / name, tmp_path)
    dry = ["make", "-n", "-C", str(tmp_path), "answers.jsonl"]
    ran = subprocess.run(dry, capture_output=True, text=True, timeout=60, check=True)
    assert "sluice batch submit prompts.jsonl --key" in ran.stdout
    (tmp_path / "answers.jsonl").touch()
    ran = subprocess.run(dry, capture_output=True, text=True, timeout=60, check=True)
    assert "up to date" in ran.stdout


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
