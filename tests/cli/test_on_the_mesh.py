"""The commands against the real mesh."""

import asyncio
import json
import re
from pathlib import Path

import jsonschema
import pytest

from cli.record import TrafficRecorder
from tests.cli.commands import Cli
from tests.support.mesh import RunningMesh

pytestmark = pytest.mark.mesh

QUESTION = "Sort ascending: 12, 3, 7"


async def test_generate(cli: Cli, mesh: RunningMesh) -> None:
    arguments = ("generate", QUESTION, "-m", "small", "--address", mesh.address)
    whole = await cli(*arguments, "--json")
    assert whole.code == 0, whole.err
    answer = json.loads(whole.out)
    assert (answer["model"], answer["tier"]) == ("small", "small")
    assert answer["text"].strip()
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"]
    assert 0 < answer["timings"]["time_to_first_token_ms"] <= answer["timings"]["total_ms"]
    streamed = await cli(*arguments)
    assert (streamed.code, streamed.out) == (0, answer["text"] + "\n")


SCHEMA = """{
  "type": "object",
  "properties": {"order": {"type": "string", "pattern": "^D-[0-9]{5}$"}, "refund": {"type": "boolean"}},
  "required": ["order", "refund"],
  "additionalProperties": false
}"""


async def test_answers_are_held_to_their_constraint(cli: Cli, mesh: RunningMesh) -> None:
    common = ("-m", "small", "--json", "--address", mesh.address, "--temperature", "1.5")
    ran = await cli("generate", QUESTION, *common, "--json-schema", SCHEMA)
    assert ran.code == 0, ran.err
    answer = json.loads(ran.out)
    assert answer["finish_reason"] == "stop"
    jsonschema.validate(json.loads(answer["text"]), json.loads(SCHEMA))
    ran = await cli("generate", QUESTION, *common, "--regex", "(yes|no), [0-9]{3}")
    assert re.fullmatch("(yes|no), [0-9]{3}", json.loads(ran.out)["text"])


DEAD_END = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
    "patternProperties": {"^a$": {"type": "boolean"}},
}


async def test_a_dead_end_fails_its_request_alone(cli: Cli, mesh: RunningMesh) -> None:
    common = ("-m", "small", "--max-tokens", "60", "--address", mesh.address)
    for _ in range(6):
        ran = await cli("generate", QUESTION, *common, "--json-schema", json.dumps(DEAD_END))
        assert "REQUEST_INVALID" in ran.err
        assert "sampling.json_schema: the answer ran into a dead end" in ran.err
    assert (await cli("generate", QUESTION, *common)).code == 0, "the breaker is closed"


async def test_eval(cli: Cli, mesh: RunningMesh) -> None:
    ran = await cli(
        *("eval", "--n", "2", "-m", "small", "-m", "auto", "--json", "--address", mesh.address)
    )
    assert ran.code == 0, ran.err
    totals = [s for s in json.loads(ran.out)["scores"] if s["kind"] == "all"]
    assert [total["model"] for total in totals] == ["small", "auto"]
    assert all(total["errors"] == 0 and total["tokens"]["small"] > 0 for total in totals)
    assert totals[1]["tokens"]["large"] > 0, "four numbers go to the large model"


async def test_outcomes_are_learned_from(cli: Cli, mesh: RunningMesh, tmp_path: Path) -> None:
    table, router = tmp_path / "outcomes.csv", tmp_path / "desk.router"
    ran = await cli(
        *("eval", "--n", "6", "--outcomes", str(table), "--json", "--address", mesh.address)
    )
    assert ran.code == 0, ran.err
    rows = json.loads(ran.out)["rows"]
    ran = await cli("router", "train", str(table), "--out", str(router), "--cascade", "--json")
    assert ran.code == 0, ran.err
    heads = json.loads(ran.out)["heads"]
    assert heads["prompts"]["rows"] == heads["cascade"]["rows"] == rows
    assert heads["prompts"]["held_out"]["strong"] > heads["prompts"]["held_out"]["weak"]


async def test_record_and_simulate(cli: Cli, mesh: RunningMesh, tmp_path: Path) -> None:
    lines: list[str] = []
    recorder = TrafficRecorder(lines.append)
    nats_url = mesh.settings.nats.url
    assert nats_url is not None
    recording = asyncio.create_task(recorder.run(nats_url, 1.0, 10.0))
    while not recording.done():
        ran = await cli("generate", QUESTION, "-m", "small", "--address", mesh.address)
        assert ran.code == 0, ran.err
    await recording
    assert recorder.written > 0
    assert recorder.unfinished == 0
    out = tmp_path / "trace.jsonl"
    out.write_text("\n".join(lines))
    ran = await cli("simulate", "--trace", str(out), "--cost", "small-cpu", "--json")
    (seen,) = json.loads(ran.out)["policies"]["continuous"]["classes"]
    assert seen["finished"] == recorder.written
    assert all(line["ttft_s"] > 0 for line in map(json.loads, lines))
