"""Runs the command in this process, beside the test's loop."""

import asyncio
import io
import sys
from pathlib import Path

import pytest

from cli.main import run
from tests.cli.commands import Cli, Ran


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Return ``await cli("generate", "hi", stdin=b"")``; no SLUICE_ADDRESS and no mesh is found."""
    monkeypatch.delenv("SLUICE_ADDRESS", raising=False)
    monkeypatch.setenv("SLUICE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "100")

    async def run_here(*arguments: str, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = await asyncio.to_thread(run, arguments)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run_here
