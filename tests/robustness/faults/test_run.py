"""A slice of `scripts/robustness chaos`: under faults each answer is that of a calm mesh, and no call hangs."""

import re
from pathlib import Path

import pytest

from tests.robustness.faults.mesh import Missing, Topology
from tests.robustness.faults.registry import FAULTS
from tests.robustness.faults.run import CalmAnswers, Plan, run_fault

pytestmark = pytest.mark.mesh

KINDS = 4
"""Worker, batcher, gateway, Triton."""


def plan(seconds: float, every: float, client: str = "sdk", faults_min: int = 1) -> Plan:
    return Plan(Topology(), client, 8, seconds, every, 60.0, faults_min)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_no_answer_changes_while_any_process_is_killed(tmp_path: Path) -> None:
    line = await run_fault("any-kill", plan(0.0, 2.0, faults_min=KINDS), CalmAnswers(), tmp_path)
    assert line.faults == KINDS
    assert line.exact, line
    assert line.answers
    assert not line.hung


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "fault", ["worker-stop", "nats-kill", "gateway-nats-reset", "batcher-triton-drop", "poison"]
)
async def test_no_answer_changes_under_other_faults(fault: str, tmp_path: Path) -> None:
    line = await run_fault(fault, plan(20.0, 5.0), CalmAnswers(), tmp_path)
    assert line.exact, line
    assert line.answers
    assert not line.hung
    # Only the poison itself fails so, which is no caller's.
    assert "INTERNAL/ENGINE_FAILED" not in line.failed


@pytest.mark.long
@pytest.mark.parametrize("fault", ["disk-full", "disk-stall", "no-quorum"])
async def test_bulk_calls_are_answered_while_nothing_is_stored(fault: str, tmp_path: Path) -> None:
    try:
        line = await run_fault(fault, plan(5.0, 1.0), CalmAnswers(), tmp_path)
    except Missing as missing:
        pytest.skip(str(missing))
    assert line.exact, line
    assert not line.failed
    (note,) = line.notes
    assert re.fullmatch(r"bulk calls: {'answered': \d+}, .*", note), note


@pytest.mark.long
async def test_callers_without_the_sdk_get_no_wrong_answer_either(tmp_path: Path) -> None:
    line = await run_fault("gateway-kill", plan(15.0, 5.0, "plain"), CalmAnswers(), tmp_path)
    assert line.exact, line
    assert line.failed


def test_every_fault_says_what_it_does() -> None:
    assert all(fault.about for fault in FAULTS.values())
