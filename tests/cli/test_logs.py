"""`sluice logs`: what several processes have written."""

import json
from pathlib import Path

import pytest

from tests.cli.commands import Cli

TRACE = "ab" * 16


@pytest.fixture
def state(tmp_path: Path) -> Path:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "gateway.log").write_text(
        "2026-11-22 10:00:02,000 WARNING gateway.x slow request_id=req-1 trace_id=" + TRACE + "\n"
        "Traceback\n  more\n2026-11-22 10:00:04,000 INFO gateway.x done\n"
    )
    (logs / "gateway.1.log").write_text("2026-11-22 10:00:01,000 INFO gateway.x first\n")
    (logs / "nats.log").write_text("[1] 2026/11/22 10:00:03.000000 [ERR] disk\nhalf a li")
    return tmp_path


async def test_logs_of_all_processes_in_one_order(cli: Cli, state: Path) -> None:
    ran = await cli("logs", "--state-dir", str(state), "--json")
    found = [json.loads(line) for line in ran.out.splitlines()]
    assert [one["message"].splitlines()[0] for one in found] == ["first", "slow", "disk", "done"]
    assert found[1]["message"] == "slow\nTraceback\n  more"
    assert found[1]["trace_id"] == TRACE


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (["--level", "warning"], ["slow", "disk"]),
        (["--request", "req-1"], ["slow"]),
        (["gateway"], ["first", "slow", "done"]),
        (["gateway.1"], ["first"]),
        (["--tail", "1"], ["done"]),
        (["--since", "10s"], []),
    ],
)
async def test_logs_are_filtered(
    cli: Cli, state: Path, options: list[str], messages: list[str]
) -> None:
    ran = await cli("logs", *options, "--state-dir", str(state), "--json")
    assert ran.code == 0, ran.err
    found = [json.loads(line)["message"].splitlines()[0] for line in ran.out.splitlines()]
    assert found == messages


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--level", "loud"], "loud"),
        (["--since", "soon"], "10m"),
        (["tritn"], "there are gateway"),
        (["--state-dir", "/nonexistent"], "no mesh has written"),
    ],
)
async def test_what_cannot_be_shown_is_said(
    cli: Cli, state: Path, options: list[str], problem: str
) -> None:
    ran = await cli("logs", "--state-dir", str(state), *options)
    assert ran.code in (1, 2)
    assert problem in ran.err
