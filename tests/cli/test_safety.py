"""`sluice safety`."""

import json
from pathlib import Path

from sluice.errors import NoDryRun
from tests.cli.commands import Cli
from tests.support.scripted import Fail, ScriptedService


async def test_table(cli: Cli) -> None:
    async with ScriptedService.serve() as service:
        ran = await cli("safety", "check", "x y", "--address", service.address)
        none = await cli("safety", "check", "", "--address", service.address)
        bad = await cli("safety", "check", "bad", "--address", service.address)
    assert (ran.code, bad.code) == (0, 0)
    assert ran.out.splitlines() == [
        "rule      severity  action  place  text",
        "pii.iban  high      redact  0-1    x",
        "passes by policy default@1 {}",
        "the model would see:",
        "<IBAN_1> y",
    ]
    assert none.out.splitlines()[0] == "nothing found"
    assert bad.out.splitlines()[-1] == "blocked by policy default@1 {}"


async def test_json_with_labels(cli: Cli) -> None:
    async with ScriptedService.serve() as service:
        words = ("safety", "check", "bad", "--label", "team=lab", "--json")
        ran = await cli(*words, "--address", service.address)
    checked = json.loads(ran.out)
    assert ran.code == 0
    assert checked["blocked"] is True
    assert checked["policy"] == "default@1 {'team': 'lab'}"
    assert checked["findings"] == [
        {"rule": "pii.iban", "severity": "high", "action": "block", "start": 0, "end": 1}
    ]


async def test_a_file_and_stdin_are_read(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes("\u200bé".encode())
    async with ScriptedService.serve() as service:
        words = ("--address", service.address)
        file = await cli("safety", "check", str(path), *words)
        stdin = await cli("safety", "check", "-", "--json", *words, stdin=b"abc")
        long = await cli("safety", "check", "a" * 5000, "--json", *words)
    assert "\\u200b" in file.out
    assert json.loads(stdin.out)["normalized_text"] == "abc"
    assert len(json.loads(long.out)["normalized_text"]) == 5000


async def test_what_cannot_be_checked_is_one_line(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"a\xff")
    ran = await cli("safety", "check", str(path))
    assert ran.code == 1
    assert ran.err.count("\n") == 1
    assert "is not valid UTF-8: byte 0xff at offset 1" in ran.err
    assert (await cli("safety", "list", "x")).code == 2
    assert (await cli("safety", "check")).code == 2
    assert (await cli("safety", "dry-run", "x")).code == 2


async def test_the_counts_of_a_dry_run(cli: Cli) -> None:
    async with ScriptedService.serve() as service:
        ran = await cli("safety", "dry-run", "--address", service.address)
        told = await cli("safety", "dry-run", "--json", "--address", service.address)
        service.lookup_failures.append(Fail(NoDryRun("no policy is under trial")))
        none = await cli("safety", "dry-run", "--address", service.address)
    assert ran.out.splitlines() == [
        "rule      now   then    count",
        "pii.iban  none  redact      3",
        "1 of 2 texts would change under policy next@1",
    ]
    assert json.loads(told.out)["moves"] == [
        {"rule": "pii.iban", "now": "none", "then": "redact", "count": 3}
    ]
    assert none.code == 1
    assert none.err == "sluice: NO_DRY_RUN: no policy is under trial\n"
