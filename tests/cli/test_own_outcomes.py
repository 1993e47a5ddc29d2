"""`sluice router train --from-mesh`: from what a gateway lists to a router, and what is refused."""

import csv
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.routing.learned.artefact import load
from sluice.v1.admin_pb2 import StreamOutcomesRequest, StreamOutcomesResponse
from sluice.v1.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from sluice.wire.clock import ms_of
from tests.cli.commands import Cli, served
from tests.learning.made_up import EASY, HARD, outcomes


class Admin(AdminServiceServicer):
    """Lists what it was given."""

    def __init__(self, rows: Sequence[StreamOutcomesResponse]) -> None:
        self.rows = rows
        self.asked: list[StreamOutcomesRequest] = []

    async def StreamOutcomes(self, request: StreamOutcomesRequest, context: Any) -> None:
        self.asked.append(request)
        for row in self.rows:
            await context.write(row)


@asynccontextmanager
async def serving(rows: Sequence[StreamOutcomesResponse]) -> AsyncIterator[tuple[Admin, str]]:
    service = Admin(rows)
    async with served(add_AdminServiceServicer_to_server, service) as address:
        yield service, address


def rows(count: int, seed: int = 0, half: str = "", **fields: Any) -> list[StreamOutcomesResponse]:
    """Outcomes as a gateway lists them; ``half`` names the side that is missing."""
    found = []
    for row in outcomes(count, seed):
        sides = {"weak": row.weak, "strong": row.strong}
        sides.pop(half, None)
        given = {
            "request_id": f"req-{half}{seed}-{row.prompt_id}",
            "tenant": "acme",
            "weak_model": "small",
            "strong_model": "large",
            **sides,
            **fields,
        }
        found.append(StreamOutcomesResponse(prompt=row.prompt, **given))
    return found


async def trained(cli: Cli, address: str, out: Path, *words: str) -> Any:
    common = ("--from-mesh", "--address", address, "--out", str(out), "--json")
    return await cli("router", "train", *words, *common)


async def test_router_learns_from_rows_with_one_or_both_sides(cli: Cli, tmp_path: Path) -> None:
    listed = [*rows(60), *rows(50, 1, "strong"), *rows(20, 2, "weak")]
    # What comes again has changed; the later one holds.
    listed = [StreamOutcomesResponse(request_id=listed[0].request_id, weak=0.5), *listed]
    listed[0].weak_model, listed[0].strong_model = "small", "large"
    async with serving(listed) as (admin, address):
        ran = await trained(cli, address, tmp_path / "r", "--tenant", "acme", "--hours", "1")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert (told["outcomes"], told["one_sided"]) == (60, 70)
    assert told["heads"]["prompts"]["rows"] == 60
    router = load(tmp_path / "r")
    assert (
        router.prompts.score(f"{HARD} near the lake?").gain
        > router.prompts.score(f"{EASY} by it?").gain + 0.2
    )
    (asked,) = admin.asked
    assert list(asked.tenants) == ["acme"]
    assert 0 <= time.time() * 1000 - 3_600_000 - ms_of(asked.since_time) < 60_000


async def test_files_are_merged_and_what_both_have_counts_once(cli: Cli, tmp_path: Path) -> None:
    kept = tmp_path / "kept.csv"
    async with serving([*rows(40), *rows(5, 2, "weak")]) as (_, address):
        first = await trained(cli, address, tmp_path / "r", "--keep", str(kept))
    assert first.code == 0, first.err
    with kept.open() as file:
        found = list(csv.DictReader(file))
    assert len(found) == 40
    assert (found[0]["prompt_id"], found[0]["tenant"]) == ("req-0-p0", "acme")
    half = rows(1, 0, "weak")[0]
    half.request_id = "req-0-p0"  # the file has both sides of it
    listed = [half, *rows(40)[20:], *rows(30, 3)]
    async with serving(listed) as (_, address):
        again = await trained(cli, address, tmp_path / "r", str(kept))
    assert again.code == 0, again.err
    assert (json.loads(again.out)["outcomes"], json.loads(again.out)["one_sided"]) == (70, 0)


async def test_a_cascade_is_learned_from_rows_with_an_answer(cli: Cli, tmp_path: Path) -> None:
    listed = [*rows(60, weak_answer="It is 5 + 7 = 12."), *rows(9, 1), *rows(9, 2, "weak")]
    async with serving(listed) as (_, address):
        ran = await trained(cli, address, tmp_path / "r", "--cascade")
    assert ran.code == 0, ran.err
    assert load(tmp_path / "r").cascade is not None
    assert (json.loads(ran.out)["outcomes"], json.loads(ran.out)["one_sided"]) == (60, 0)


@pytest.mark.parametrize(
    ("listed", "words", "says"),
    [
        ([], (), "NO_OUTCOMES: the mesh has kept no outcomes yet; the answers of both models"),
        (rows(29) + rows(90, 1, "weak"), (), "29 outcomes, at least 30 are needed; the answers of"),
        (rows(40, 1, "weak"), (), "the mesh: 0 outcomes, at least 30 are needed; the answers of"),
        (rows(40, weak=1.0, strong=1.0), (), "only one class, weak is 1 in every row"),
        (
            rows(40) + rows(30, 1, strong_model="next"),
            (),
            "--pair: choose one of small/large (40), small/next (30)",
        ),
        (rows(40), ("--pair", "a/b"), "--pair: choose one of small/large (40)"),
        (
            rows(40),
            ("--keep", "/nowhere/x.csv"),
            "OUTPUT_NOT_WRITABLE: /nowhere/x.csv cannot be written",
        ),
    ],
)
async def test_what_is_refused(
    cli: Cli,
    tmp_path: Path,
    listed: list[StreamOutcomesResponse],
    words: tuple[str, ...],
    says: str,
) -> None:
    router = tmp_path / "r"
    router.write_text("the old one")
    async with serving(listed) as (_, address):
        ran = await trained(cli, address, router, *words)
    assert ran.code == 1
    assert says in ran.err
    assert router.read_text() == "the old one"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("train",), "name OUTCOMES.csv, or learn --from-mesh"),
        (("train", "x.csv", "--tenant", "acme"), "--keep belong to --from-mesh"),
    ],
)
async def test_words_that_do_not_go_together(
    cli: Cli, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    ran = await cli("router", *words, "--out", str(tmp_path / "r"))
    assert ran.code == 1
    assert says in ran.err
