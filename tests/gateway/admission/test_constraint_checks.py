"""Constraints are compiled by processes with limits; a tenant's slow ones delay those of another by a turn at most."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import AsyncMock

import psutil
import pytest

from gateway.admission.constraint_checks import CHILDREN, OPEN_MAX, ConstraintChecks
from gateway.admission.constraint_child import MEMORY_BYTES
from sluice.errors import Overloaded
from tests.sluice.slow_constraints import SLOW

BOUND_S = 30.0
GOOD = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
ENDLESS = SLOW["many patterns at once"][1]
COSTLY = json.dumps({"type": "object", "properties": {"a": {}, "b": json.loads(ENDLESS)}})


def group_of(pid: int) -> str:
    """What the kernel says of the process's session, where it groups processes so."""
    path = Path(f"/proc/{pid}/autogroup")
    return path.read_text() if path.exists() else "nice 10\n"


def endless(number: int) -> str:
    return json.dumps({**json.loads(ENDLESS), "title": str(number)})


@pytest.fixture
async def checks() -> AsyncIterator[ConstraintChecks]:
    made = ConstraintChecks()
    yield made
    children = list(made.children)
    async with asyncio.timeout(BOUND_S):
        await made.close()
    assert all(child.returncode is not None for child in children)


async def test_a_good_constraint_is_compiled_once(checks: ConstraintChecks) -> None:
    found = await asyncio.gather(*(checks.problem("json_schema", GOOD, "acme") for _ in range(5)))
    assert found == [None] * 5
    (child,) = checks.children
    child.kill()
    child.wait()
    assert await checks.problem("json_schema", GOOD, "other") is None
    assert not checks.open.counts


async def test_a_constraint_that_no_process_compiles_is_asked_again(
    checks: ConstraintChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken_compile(kind: str, text: str) -> None:
        raise ChildProcessError("none came up")

    with monkeypatch.context() as broken:
        broken.setattr(checks, "compile", broken_compile)
        with pytest.raises(Overloaded, match="no process compiles constraints now; try again"):
            await checks.problem("regex", "a+", "acme")
    assert await checks.problem("regex", "a+", "acme") is None


async def test_results_are_cached_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = ConstraintChecks(results_max=2)
    monkeypatch.setattr(checks, "compile", AsyncMock(return_value=None))
    for text in "abc":
        assert await checks.problem("regex", text, "acme") is None
    assert len(checks.results) == 2


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("regex", "(", "unclosed group"),
        ("json_schema", "[]", "must be a JSON object"),
        ("json_schema", '{"type": 5}', "type must be"),
        ("regex", "x" * 9000, "at most 8192 bytes"),
        ("json_schema", COSTLY, "to compile: make it simpler: fewer and smaller counted"),
    ],
)
async def test_what_is_wrong_is_said(
    checks: ConstraintChecks, kind: str, text: str, says: str
) -> None:
    assert says in str(await checks.problem(kind, text, "acme"))


@pytest.mark.parametrize("name", SLOW)
async def test_no_constraint_takes_more_than_its_share(checks: ConstraintChecks, name: str) -> None:
    kind, text = SLOW[name]
    async with asyncio.timeout(BOUND_S):
        problem = await checks.problem(kind, text, "acme")
    if problem is not None:
        assert "compile: " in problem or "multiple" in problem or "too" in problem, problem
    for child in checks.children:
        used = psutil.Process(child.pid).memory_info().rss
        assert used < MEMORY_BYTES + (128 << 20)


async def test_a_child_gives_way_to_its_gateway(checks: ConstraintChecks) -> None:
    assert await checks.problem("json_schema", GOOD, "acme") is None
    pid = checks.children[0].pid
    assert os.getsid(pid) == pid  # else the kernel's group of the gateway's session pays for it
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + 10
    assert group_of(pid).endswith("nice 10\n")


async def test_a_child_that_is_killed_ends_one_constraint(checks: ConstraintChecks) -> None:
    assert await checks.problem("json_schema", GOOD, "acme") is None
    (child,) = checks.children
    asking = asyncio.ensure_future(checks.problem("json_schema", endless(0), "acme"))
    await asyncio.sleep(0)  # it begins
    child.kill()
    assert "256 MiB to compile" in str(await asyncio.wait_for(asking, BOUND_S))
    assert await checks.problem("regex", "a+", "acme") is None


async def test_tenants_take_turns(
    checks: ConstraintChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = list[str]()
    gate = asyncio.Event()

    async def slow_compile(kind: str, text: str) -> None:
        await gate.wait()
        order.append(text[0])

    monkeypatch.setattr(checks, "compile", slow_compile)
    asked = list[asyncio.Future[str | None]]()

    async def ask(tenant: str, text: str) -> None:
        asked.append(asyncio.ensure_future(checks.problem("regex", text, tenant)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    for number in range(OPEN_MAX):
        await ask("hostile", f"a{number}")
    with pytest.raises(Overloaded, match="16 constraints of your tenant"):
        await checks.problem("regex", "a-more", "hostile")
    await ask("quiet", "b")
    gate.set()
    assert await asyncio.wait_for(asyncio.gather(*asked), BOUND_S) == [None] * len(asked)
    assert order.index("b") <= 2 * CHILDREN
