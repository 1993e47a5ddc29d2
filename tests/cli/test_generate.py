"""`sluice generate`: what it asks, what it prints, how it ends."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from sluice import errors
from sluice.v1 import inference_pb2 as pb
from tests.cli.commands import Cli
from tests.support.scripted import Fail, ScriptedService, Step, delta, finished, started

WHOLE: Sequence[Step] = [started(), delta(0, "ab"), delta(2, "c"), finished()]


LOST = Fail(errors.EngineFailed("row lost"))
UNKNOWN = Fail(errors.UnknownModel("no model 'x';\nknown: small", metadata={"models": "small"}))


@pytest.mark.parametrize(
    ("script", "prompt", "code", "out", "err"),
    [
        (WHOLE, b"p", 0, "abc\n", ""),
        ([UNKNOWN], b"p", 1, "", "MODEL_UNKNOWN: no model 'x'; known: small"),
        ([started(), delta(0, "ab"), LOST], b"p", 1, "ab\n", "ENGINE_FAILED: row lost"),
        (
            *(WHOLE, b"caf\xe9", 1, ""),
            "REQUEST_INVALID: prompt: is not valid UTF-8: byte 0xe9 at offset 3",
        ),
    ],
    ids=["answer", "error", "broken off", "not UTF-8"],
)
async def test_text_on_stdout_and_one_line_of_error(
    cli: Cli, script: Sequence[Step], prompt: bytes, code: int, out: str, err: str
) -> None:
    async with ScriptedService.serve([script]) as service:
        ran = await cli("generate", "-", "--address", service.address, stdin=prompt)
    assert (ran.code, ran.out, ran.err) == (code, out, f"sluice: {err}\n" if err else "")
    assert all(request.prompt == "p" for request in service.requests)


async def test_json_is_one_object(cli: Cli) -> None:
    async with ScriptedService.serve([WHOLE]) as service:
        ran = await cli("generate", "hello", "--json", "--address", service.address)
    assert (ran.code, ran.err) == (0, "")
    answer = json.loads(ran.out)
    assert ran.out.count("\n") == 1
    timings = answer.pop("timings")
    assert (timings["time_to_first_token_ms"], timings["total_ms"]) == (1.5, 4.25)
    assert answer == {
        "request_id": "r1",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "model": "small",
        "tier": "small",
        "route": {"tier": "small", "strategy": "rules", "reason": "default", "degraded": False},
        "seed": 7,
        "text": "abc",
        "token_ids": [100, 101, 102],
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "cached_prompt_tokens": 0,
            "resumed_tokens": 0,
            "cached": False,
        },
    }


async def test_json_has_logprobs_stop_and_notices(cli: Cli) -> None:
    piece = delta(0, "a")
    top = pb.TokenLogprob(token_id=5, text="b", logprob=-1.5)
    logprobs = pb.TokenLogprobs(logprob=-0.5, text="a", token_bytes=b"a", top=[top])
    piece.delta.logprobs.append(logprobs)
    notice = pb.Notice(kind=pb.NOTICE_KIND_RECOVERED, message="m")
    end = finished(1, pb.FINISH_REASON_STOP_SEQUENCE)
    end.finished.stop = "END"
    script = [started(), pb.GenerateResponse(notices=[notice]), piece, end]
    async with ScriptedService.serve([script]) as service:
        ran = await cli("generate", "p", "--json", "--logprobs", "1", "--address", service.address)
    answer = json.loads(ran.out)
    assert answer["logprobs"] == [
        {
            "logprob": -0.5,
            "text": "a",
            "token_bytes": [97],
            "top": [{"token_id": 5, "text": "b", "logprob": -1.5, "token_bytes": []}],
        }
    ]
    assert (answer["finish_reason"], answer["stop"]) == ("stop_sequence", "END")
    assert answer["notices"] == [
        {"kind": "recovered", "message": "m", "model": "", "degraded": False, "inexact": False}
    ]


async def test_options_travel(cli: Cli) -> None:
    async with ScriptedService.serve([WHOLE]) as service:
        ran = await cli(
            *("generate", "p", "--address", service.address, "-m", "large", "--priority", "bulk"),
            *("--max-tokens", "9", "--temperature", "0.5", "--top-p", "0.25", "--top-k", "4"),
            *("--seed", "11", "--stop", "x", "--stop", "y", "--repetition-penalty", "1.5"),
            *("--min-p", "0.125", "--presence-penalty", "0.5", "--frequency-penalty", "-0.5"),
            *("--min-tokens", "3", "--regex", "a+"),
            *("--label", "team=desk", "--label", "a=b=c", "--timeout", "60", "--raw"),
        )
    assert ran.code == 0
    (request,) = service.requests
    assert request.sampling == pb.SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_p=0.25,
        top_k=4,
        seed=11,
        stop=["x", "y"],
        repetition_penalty=1.5,
        min_p=0.125,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        min_tokens=3,
        regex="a+",
    )
    assert (request.model, request.priority) == ("large", pb.PRIORITY_BULK)
    assert dict(request.labels) == {"team": "desk", "a": "b=c"}
    assert request.raw_prompt
    assert service.timeouts[0] is not None


async def test_schema_as_text_or_in_a_file(cli: Cli, tmp_path: Path) -> None:
    text = ' {"type": "null"}'
    file = tmp_path / "schema.json"
    file.write_text(text)
    async with ScriptedService.serve([WHOLE, WHOLE]) as service:
        for given in (text, str(file)):
            await cli("generate", "p", "--json-schema", given, "--address", service.address)
    assert [request.sampling.json_schema for request in service.requests] == [text, text]


@pytest.mark.parametrize(
    ("arguments", "prompt"), [(["-"], "a\nb"), (["-", "--raw"], "a\nb\n")], ids=["chat", "raw"]
)
async def test_prompt_from_stdin(cli: Cli, arguments: list[str], prompt: str) -> None:
    async with ScriptedService.serve([WHOLE]) as service:
        await cli("generate", *arguments, "--address", service.address, stdin=b"a\nb\n")
    assert service.requests[0].prompt == prompt


async def test_error_is_an_object_with_json(cli: Cli) -> None:
    full = Fail(errors.Overloaded("full", metadata={"queue": "9"}, retry_after_s=2.0))
    async with ScriptedService.serve([[started(), delta(0, "a"), full]]) as service:
        ran = await cli("generate", "p", "--json", "--address", service.address)
    assert ran.code == 1
    assert json.loads(ran.out) == {
        "error": {
            "reason": "OVERLOADED",
            "message": "full",
            "code": "RESOURCE_EXHAUSTED",
            "metadata": {"queue": "9"},
            "retry_after_s": 2.0,
        }
    }
    assert ran.err == "sluice: OVERLOADED: full\n"


async def test_several_answers(cli: Cli) -> None:
    script = [started(), delta(0, "ab"), finished(2)]
    for event in [started(), delta(0, "cd"), finished(2)]:
        event.answer_index = 1
        script.append(event)
    async with ScriptedService.serve([script]) as service:
        options = ("generate", "p", "--n", "2", "--address", service.address)
        ran, as_json = await cli(*options), await cli(*options, "--json")
    assert (ran.code, ran.out) == (0, "[1] ab\n[2] cd\n")
    assert [json.loads(line)["text"] for line in as_json.out.splitlines()] == ["ab", "cd"]
    assert service.requests[0].sampling.n == 2


async def test_reasoning_is_on_stderr(cli: Cli) -> None:
    thought = delta(0, "")
    thought.delta.reasoning = "hm"
    async with ScriptedService.serve([[started(), thought, *WHOLE[1:]]]) as service:
        ran = await cli("generate", "p", "--address", service.address)
        as_json = await cli("generate", "p", "--json", "--address", service.address)
    assert (ran.out, ran.err) == ("abc\n", "hm\n")
    assert json.loads(as_json.out)["reasoning"] == "hm"


async def test_tools_and_their_calls(cli: Cli, tmp_path: Path) -> None:
    plain = {"name": "rain", "parameters": {"type": "object"}}
    of_openai = {"type": "function", "function": {"name": "sun", "description": "d"}}
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([of_openai]))
    called = delta(0, "abc")
    called.delta.tool_calls.add(id="c1", name="rain", arguments='{"at": "Oslo"}')
    async with ScriptedService.serve([[started(), called, finished()]]) as service:
        options = (
            *("generate", "p", "--address", service.address, "--tool", json.dumps(plain)),
            *("--tool", str(file), "--tool-choice", "required"),
        )
        ran, as_json = await cli(*options), await cli(*options, "--json")
    call = {"id": "c1", "name": "rain", "arguments": '{"at": "Oslo"}'}
    text, printed = ran.out.splitlines()
    assert (text, json.loads(printed)) == ("abc", call)
    assert json.loads(as_json.out)["tool_calls"] == [call]
    asked = service.requests[0]
    assert [(one.name, one.description) for one in asked.tools] == [("rain", ""), ("sun", "d")]
    assert asked.tool_choice.mode == pb.TOOL_CHOICE_MODE_REQUIRED


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "p", "--tool", "{"], "is no tool"),
        (["generate", "p", "--tool", '{"nonsense": 1}'], "is no tool"),
        (["generate", "p", "--tool", "/none.json"], "No such file"),
        (["generate", "p", "--n", "17"], "less than or equal to 16"),
        (["generate", "p", "--json-schema", "nowhere.json"], "nowhere.json: No such file"),
        (["generate", "p", "--timeout", "0"], "--timeout: 0 must be greater than 0"),
        (["generate"], "PROMPT"),
        (["generate", "p", "--label", "nothing"], "'nothing' is not KEY=VALUE"),
        (["generate", "p", "--priority", "urgent"], "urgent"),
        (["generate", "p", "--logprobs", "2"], "--json"),
        (["generate", "p", "--max-tokens", "many"], "valid integer"),
        (["generate", "p", "--nonsense"], "--nonsense"),
        (["nonsense"], "nonsense"),
    ],
)
async def test_wrong_command_line(cli: Cli, arguments: list[str], says: str) -> None:
    ran = await cli(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("sluice: USAGE: ")
    assert says in ran.err
    assert ran.err.count("\n") == 1
