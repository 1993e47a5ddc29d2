"""A short run of each command, as scripts/robustness starts it."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.robustness import hostile
from tests.robustness.__main__ import COMMANDS
from tests.robustness.attacks import ATTACKS

ROOT = Path(__file__).parents[2]


def lines(name: str, *arguments: str) -> list[dict[str, object]]:
    result = subprocess.run(
        ["scripts/robustness", name, "--json", *arguments],
        env={**os.environ, "PYTHON": sys.executable},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def test_a_command_that_is_none_names_those_that_are() -> None:
    result = subprocess.run(
        ["scripts/robustness", "quake"],
        env={**os.environ, "PYTHON": sys.executable},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert result.returncode == 2
    assert all(f"\n{name} " in result.stderr for name in COMMANDS)


@pytest.mark.long
@pytest.mark.mesh
@pytest.mark.timeout(300)
async def test_memory_of_a_short_soak_is_printed() -> None:
    found = await asyncio.to_thread(lines, "soak", "--runs", "1")
    assert found
    for figure in found:
        assert {"figure", "ours", "unit", "runs", "machine", "note"} <= set(figure)
        assert figure["ours"] is not None


@pytest.mark.long
@pytest.mark.mesh
@pytest.mark.timeout(300)
async def test_cost_of_held_requests_by_state_and_process() -> None:
    found = await asyncio.to_thread(lines, "soak", "--hold", "16", "--prompt-words", "8")
    names = {figure["figure"] for figure in found}
    states = ("waiting", "running", "token", "waiting_ended", "running_ended")
    assert names >= {f"held_{state}_gateway" for state in states}


@pytest.mark.long
@pytest.mark.mesh
@pytest.mark.timeout(300)
async def test_hostile_calls_end_with_typed_errors() -> None:
    options = ["--size", "100", "--hold", "1"]
    found = await asyncio.to_thread(lines, "abuse", *options)
    assert len(found) == len(ATTACKS)
    for line in found:
        assert (line["exit_code"], line["interactive_errors"]) == (0, {}), line
        outcomes = line["outcomes"]
        assert isinstance(outcomes, dict)
        assert not any(word in kind for kind in outcomes for word in ("untyped", "INTERNAL")), line


@pytest.mark.long
@pytest.mark.mesh
@pytest.mark.timeout(300)
async def test_hostile_tenants_fail_no_call_of_a_quiet_one() -> None:
    options = ["--attacks", "hostile", "--minutes", "0.5", "--cycle", "0.5"]
    found = {one["figure"]: one for one in await asyncio.to_thread(lines, "abuse", *options)}
    assert found["abuse_quiet_failed"]["ours"] == 0, found
    assert found["abuse_ended"]["ours"] == 0, found
    assert found["abuse_internal"]["ours"] == 0, found
    assert found["abuse_memory_above_idle"]["ours"] < 300, found
    settings = found["abuse_internal"]["settings"]
    assert isinstance(settings, dict)
    kinds = {name.split()[0] for name in settings["ends"]}
    assert kinds == set(hostile.ATTACKS)


@pytest.mark.long
@pytest.mark.mesh
@pytest.mark.timeout(300)
async def test_tenant_beside_a_flood_has_its_share() -> None:
    (found,) = await asyncio.to_thread(lines, "fairness", "--calls", "4000")
    assert found["also"]["ended"] == 4_400, found  # type: ignore[index]
    assert found["also"]["failed"] == 0, found  # type: ignore[index]
    assert found["ours"] < 0.1, found  # type: ignore[operator]


@pytest.mark.long
async def test_connections_without_credentials_are_small() -> None:
    figures = await asyncio.to_thread(lines, "connections", "--count", "200")
    memory = {one["figure"]: one["ours"] for one in figures if one["unit"] == "KiB"}
    assert len(memory) == 8
    assert all(kib <= 64 for kib in memory.values()), memory  # type: ignore[operator]
