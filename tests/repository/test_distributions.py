"""What one installs: `sluice` alone is a client of a mesh elsewhere, and each extra holds what its processes import."""

import asyncio
import json
import subprocess
import sys
import tomllib
import venv
import zipfile
from functools import cache
from importlib import metadata
from itertools import chain
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement

from tests.support.installed import (
    ROOT,
    modules,
    named,
    root_packages,
    settings,
)
from tests.support.scripted import ScriptedService, delta, finished, started

BARE_BYTES_MAX = 60_000_000
CLIENT = {"sluice", "cli"}
"""The packages of the wheel `sluice-llm`."""
STREAM = """
import sys
from sluice.client import Client

with Client(sys.argv[1]) as client:
    print(client.generate("hello").answer().text)
"""


def mesh_project() -> dict[str, object]:
    path = ROOT / "distributions/mesh/pyproject.toml"
    project: dict[str, object] = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    return project


def test_both_distributions_have_one_version() -> None:
    assert mesh_project()["version"] == settings()["project"]["version"]


def test_nothing_of_ours_is_required_by_name() -> None:
    """Such a name would be looked up in an index, where it is not ours. An extra may name other extras."""
    project = settings()["project"]
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    ours = [one for one in map(Requirement, lines) if one.name.startswith("sluice")]

    assert mesh_project()["dependencies"] == []
    assert {(one.name, str(one.specifier)) for one in ours} == {(project["name"], "")}
    assert all(one.extras for one in ours)


@pytest.mark.parametrize("extra", ["gateway", "batcher", "worker", "mesh", "dev"])
def test_every_extra_of_a_process_brings_the_processes(extra: str) -> None:
    assert {one.name for one in named("process")} <= {one.name for one in named(extra)}


@cache
def imports() -> grimp.ImportGraph:
    """Who imports whom."""
    return grimp.build_graph(*root_packages(), include_external_packages=True)


@pytest.mark.parametrize(
    ("extra", "package"),
    [
        ("gateway", "gateway"),
        ("batcher", "batcher"),
        ("worker", "model_workers"),
        ("mesh", "supervisor"),
        ("", "sluice.client"),
    ],
)
def test_an_extra_names_what_its_process_imports(extra: str, package: str) -> None:
    reached = {name.partition(".")[0] for name in imports().find_upstream_modules(package, True)}
    given = modules(frozenset(one.name for one in named(extra)))
    inside = {*root_packages(), *sys.stdlib_module_names, "triton_python_backend_utils", "gguf"}

    assert reached - inside - given == set()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels of both distributions, by the beginning of their file name."""
    folder = tmp_path_factory.mktemp("wheels")
    pip(
        sys.executable,
        "wheel",
        "--no-deps",
        "--wheel-dir",
        folder,
        ROOT,
        ROOT / "distributions/mesh",
    )
    return {wheel.name.partition("-")[0]: wheel for wheel in folder.iterdir()}


def pip(python: str | Path, *arguments: str | Path) -> None:
    """Runs pip of the environment of ``python``."""
    result = subprocess.run(
        [python, "-m", "pip", "--quiet", *arguments], capture_output=True, text=True, timeout=170
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.long
def test_each_package_is_in_one_wheel(wheels: dict[str, Path]) -> None:
    tops = {
        name: {entry.partition("/")[0] for entry in zipfile.ZipFile(wheel).namelist()}
        for name, wheel in wheels.items()
    }

    assert {top for top in tops["sluice_llm"] if "." not in top} == CLIENT
    assert {top for top in tops["sluice_llm_mesh"] if "." not in top} == {*root_packages()} - CLIENT


@pytest.mark.long
def test_an_index_with_our_names_gives_nothing(tmp_path: Path, wheels: dict[str, Path]) -> None:
    for requirement in named("batcher"):
        write_empty_wheel(tmp_path, requirement.name, metadata.version(requirement.name))
    for name in ("sluice", "sluice-mesh", "sluice-llm", "sluice-llm-mesh"):
        write_empty_wheel(tmp_path, name, "99.0")
    ours = [f"{wheels['sluice_llm']}[batcher]", str(wheels["sluice_llm_mesh"])]
    options = ["--isolated", "--no-index", "--find-links", str(tmp_path), "--ignore-installed"]
    options += ["--dry-run", "--quiet", "--report", "-"]
    result = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *ours],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    taken = {
        one["metadata"]["name"]: one["metadata"]["version"]
        for one in json.loads(result.stdout)["install"]
    }

    version = settings()["project"]["version"]
    assert {name: taken[name] for name in taken if name.startswith("sluice")} == {
        "sluice-llm": version,
        "sluice-llm-mesh": version,
    }
    assert "tritonclient" in taken


def write_empty_wheel(folder: Path, name: str, version: str) -> None:
    """A wheel that installs nothing and requires nothing."""
    stem = f"{name.replace('-', '_')}-{version}"
    lines = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        # Any extra may be asked of it.
        wheel.writestr(
            f"{stem}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nProvides-Extra: grpc\n",
        )
        wheel.writestr(f"{stem}.dist-info/WHEEL", lines)
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.mark.long
async def test_an_environment_with_the_bare_wheel(tmp_path: Path, wheels: dict[str, Path]) -> None:
    await asyncio.to_thread(venv.create, tmp_path, with_pip=True)
    python = tmp_path / "bin/python"
    packages = tmp_path / f"lib/python3.{sys.version_info.minor}/site-packages"
    before = {path for path in packages.rglob("*") if path.is_file()}
    await asyncio.to_thread(pip, python, "install", "--no-compile", wheels["sluice_llm"])

    assert {name for name in root_packages() if (packages / name).exists()} == CLIENT
    added = {path for path in packages.rglob("*") if path.is_file()} - before
    assert sum(path.stat().st_size for path in added) < BARE_BYTES_MAX
    async with ScriptedService.serve([[started(), delta(0, "abc"), finished()]] * 2) as service:
        for command in (
            [python, "-I", "-c", STREAM, service.address],
            [tmp_path / "bin/sluice", "generate", "--address", service.address, "hello"],
        ):
            result = await asyncio.to_thread(
                subprocess.run, command, cwd=tmp_path, capture_output=True, text=True, timeout=60
            )
            assert result.returncode == 0, result.stderr
            assert "abc" in result.stdout
