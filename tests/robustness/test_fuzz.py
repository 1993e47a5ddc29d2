"""A slice of the fuzzing of tests/robustness/fuzz.py, which runs a million inputs."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import patch

import pytest

from tests.robustness.fuzz import Run
from tests.robustness.fuzz_targets import TARGETS, Fuzzed
from tests.robustness.mutator import Mutator


@pytest.mark.parametrize("name", TARGETS)
async def test_a_slice_finds_nothing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run, count = Run(name, seed=18), 3 if name == "parquet" else 40
    with (
        patch("sluice.telemetry.exchange.GATHER_S", 0.0),
        patch("tests.robustness.fuzz._resident", int),  # nothing is said of so short a run's memory
    ):
        await run.blocks(0, count)
    assert not run.findings, capsys.readouterr().out
    assert run.line["inputs"] == count
    assert name != "jobs" or {"OK", "FAILED_PRECONDITION"} & run.outcomes.keys(), "no store"


async def test_a_finding_says_how_to_replay_it(capsys: pytest.CaptureFixture[str]) -> None:
    drawn: list[list[int]] = []

    async def fuzzed(draw: Mutator) -> str:
        number = draw.number(0, 2**64)
        drawn[-1].append(number)
        if len(drawn[-1]) == 8:
            raise ZeroDivisionError
        return "taken"

    @asynccontextmanager
    async def opened() -> AsyncIterator[Fuzzed]:
        drawn.append([])
        yield fuzzed

    with patch.dict("tests.robustness.fuzz.TARGETS", {"test": opened}):
        for _ in range(2):
            run = Run("test", seed=5)
            await run.blocks(3, 10)
            assert run.findings == 1
    assert drawn[0] == drawn[1]
    line = json.loads(capsys.readouterr().out.splitlines()[0])
    assert line["finding"] == "block 3, input 7"
    assert line["replay"] == "--seed 5 --targets test"
    assert line["error"][-1] == "ZeroDivisionError"
