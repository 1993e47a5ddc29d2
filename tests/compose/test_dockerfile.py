"""The Dockerfile copies what exists, and its images hold what their services run."""

import fnmatch
import re
import tomllib
from pathlib import PurePosixPath

import pytest

from tests.support.compose import FOLDER, ROOT

INSTRUCTIONS = re.sub(
    r"\\\n", " ", (FOLDER / "Dockerfile").read_text(encoding="utf-8")
).splitlines()
STAGES = {
    match[2]: match[1] for line in INSTRUCTIONS if (match := re.match(r"FROM (\S+) AS (\w+)", line))
}


def stage_lines(stage: str) -> list[str]:
    start = next(i for i, line in enumerate(INSTRUCTIONS) if line.endswith(f" AS {stage}"))
    lines = INSTRUCTIONS[start + 1 :]
    end = next((i for i, line in enumerate(lines) if line.startswith("FROM ")), len(lines))
    return lines[:end]


def copies(lines: list[str]) -> list[tuple[list[str], str]]:
    found = [line.split()[1:] for line in lines if line.startswith("COPY ")]
    return [(words[:-1], words[-1]) for words in found]


def in_build_context(path: str) -> bool:
    lines = (FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    kept = [line.removeprefix("!") for line in lines if line.startswith("!")]
    # What lies in a folder that is kept is kept too.
    names = [path, *(parent.as_posix() for parent in PurePosixPath(path).parents)]
    return any(fnmatch.fnmatch(name, pattern) for name in names for pattern in kept)


def test_copied_paths_exist_and_are_in_the_build_context() -> None:
    sources = [source for paths, _ in copies(INSTRUCTIONS) for source in paths]

    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert in_build_context(source), source


def test_wheel_stage_copies_packages_and_their_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {*project["tool"]["importlinter"]["root_packages"], "distributions"}

    sources = {source for paths, _ in copies(stage_lines("wheel")) for source in paths}

    assert {*packages, "pyproject.toml", project["project"]["readme"]} <= sources


def test_images_do_not_run_as_root() -> None:
    for stage in ("process", "worker"):
        (user,) = (line.split()[1] for line in stage_lines(stage) if line.startswith("USER "))
        assert int(user.split(":")[0]) > 0


@pytest.mark.parametrize(
    ("stage", "extras"), [("process", "gateway,batcher,jobs"), ("worker", "worker")]
)
def test_an_image_installs_the_extras_of_its_processes(stage: str, extras: str) -> None:
    (install,) = (line for line in stage_lines(stage) if "pip install" in line)

    assert f"--no-deps --require-hashes -r /dist/{stage}.txt" in install
    assert f'"$(echo /dist/sluice_llm-*.whl)[{extras}]" /dist/sluice_llm_mesh-*.whl' in install
