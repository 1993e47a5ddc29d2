"""Node's @grpc/grpc-js with @grpc/proto-loader: a client that has nothing of Sluice but the .proto files."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from tests.interop.tools import BOUND_S, PROTOS, Ran, run

pytestmark = pytest.mark.mesh

SOURCES: Final = Path(__file__).with_name("node")
NO_NETWORK: Final = (
    "ENOTFOUND",
    "EAI_AGAIN",
    "ECONNREFUSED",
    "ECONNRESET",
    "ETIMEDOUT",
    "ENETUNREACH",
    "ERR_SOCKET_TIMEOUT",
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the client and its packages, at the versions of package-lock.json."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "package-lock.json", "generate.js"):
        shutil.copy(SOURCES / name, folder)
    options = ("--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1")
    command = ["npm", "ci", *options, "--cache", folder / "cache"]
    installed = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    signs = [sign for sign in NO_NETWORK if sign in installed.stderr]
    if installed.returncode != 0 and signs:
        pytest.skip(f"npm's registry cannot be reached: {signs[0]}")
    assert installed.returncode == 0, installed.stderr
    return folder


async def generate(project: Path, address: str, request: dict[str, Any]) -> Ran:
    return await run("node", "generate.js", PROTOS, address, json.dumps(request), cwd=project)


async def test_streams_an_answer(project: Path, address: str) -> None:
    request = {
        "prompt": "Sort ascending: 7, 3, 12",
        "model": "small",
        "sampling": {"max_tokens": 32},
    }
    ran = await generate(project, address, request)
    assert ran.code == 0, ran.out + ran.err
    events = json.loads(ran.out)["events"]
    kinds = [event["event"] for event in events]
    assert (kinds[0], kinds[-1]) == ("started", "finished")
    assert events[0]["started"]["model"] == "small"
    # Protobuf leaves empty fields out of JSON: the end token has no text.
    deltas = [event["delta"] for event in events if event["event"] == "delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == "3, 7, 12"
    assert events[-1]["finished"]["reason"] in ("FINISH_REASON_STOP", "FINISH_REASON_LENGTH")


async def test_conversation(project: Path, address: str) -> None:
    turns = [{"role": "ROLE_USER", "content": "Sort ascending: 7, 3"}]
    ran = await generate(project, address, {"chat": {"messages": turns}, "model": "large"})
    assert ran.code == 0, ran.out + ran.err


async def test_error_arrives_with_its_code(project: Path, address: str) -> None:
    ran = await generate(project, address, {"prompt": "hello", "model": "nobody"})
    assert ran.code == 1
    error = json.loads(ran.out)
    assert error["code"] == "NOT_FOUND"
    assert "known: small, large" in error["details"]
