"""`sluice demo`: what each of its parts prints, and what makes it fail."""

from collections.abc import Sequence
from typing import Any

import pytest

from cli.demo import KILL_TOKENS, STREAMS, answer_tasks, draw_trace, survive_crash
from cli.failure import CommandFailed
from sluice import errors
from sluice.client.aio import AsyncClient
from sluice.v1 import inference_pb2 as pb
from tests.cli.commands import Cli
from tests.cli.test_explain import serving
from tests.support.scripted import Fail, ScriptedService, Step, delta, finished, started

TASKS = {"first": "small", "second": "small"}
WORKERS = ("worker-0", "worker-1")
MARKED = [started(), delta(0, "a" * KILL_TOKENS)]
RECOVERED = pb.GenerateResponse(notices=[pb.Notice(kind=pb.NOTICE_KIND_RECOVERED)])
UNDISTURBED: list[Step] = [*MARKED, delta(KILL_TOKENS, "b"), finished()]
INTERRUPTED: list[Step] = [*MARKED, RECOVERED, delta(KILL_TOKENS, "b"), finished()]
LOST: list[Step] = [*MARKED, RECOVERED, finished()]
CHANGED: list[Step] = [*MARKED, RECOVERED, delta(KILL_TOKENS, "b", [7]), finished()]


async def test_every_task_has_its_answer_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    script = [started(), delta(0, "one\ntwo"), finished()]
    async with ScriptedService.serve([script]) as service, AsyncClient(service.address) as client:
        answers = await answer_tasks(client, TASKS)
    assert [(request.prompt, request.model) for request in service.requests] == [
        ("first", "auto"),
        ("second", "auto"),
    ]
    assert [answer["text"] for answer in answers] == ["one\ntwo"] * 2
    shown = capsys.readouterr().out
    assert (
        shown.count("   small: one\n   two\n     because: default; first token after 2 ms\n") == 2
    )


async def test_another_model_than_the_tasks_fails() -> None:
    script = [started("large"), delta(0, "abc"), finished()]
    async with ScriptedService.serve([script]) as service, AsyncClient(service.address) as client:
        with pytest.raises(CommandFailed, match="'first': large answered instead of small") as info:
            await answer_tasks(client, TASKS)
    assert [answer["text"] for answer in info.value.done["answers"]] == ["abc"]


async def test_task_without_an_answer_fails() -> None:
    script = [Fail(errors.EngineFailed("lost"))]
    async with ScriptedService.serve([script]) as service, AsyncClient(service.address) as client:
        with pytest.raises(errors.EngineFailed):
            await answer_tasks(client, TASKS)


async def crash_of(*runs: Sequence[Step]) -> tuple[dict[str, Any], list[str]]:
    """The result of a crash where all streams of each run have its script, and the workers that were killed."""
    killed = list[str]()
    scripts = [run for run in (UNDISTURBED, *runs) for _ in range(STREAMS)]
    async with ScriptedService.serve(scripts) as service, AsyncClient(service.address) as client:
        return await survive_crash(client, WORKERS, killed.append), killed


async def test_crash_without_damage_shows_the_gap(capsys: pytest.CaptureFixture[str]) -> None:
    crash, killed = await crash_of(INTERRUPTED)
    assert crash["killed"] == killed == ["worker-0"]
    assert (crash["recovered"], crash["damaged"], crash["tokens"]) == (STREAMS, 0, 404)
    assert crash["gap_ms"] > 0
    shown = capsys.readouterr().out
    assert (
        "   killed worker-0 after 100 tokens: 4 of 4 streams went on at another worker\n" in shown
    )
    assert " ms; 404 tokens compared with an undisturbed run: 0 streams differ\n" in shown


async def test_worker_without_streams_is_followed_by_the_next() -> None:
    crash, killed = await crash_of(UNDISTURBED, INTERRUPTED)
    assert killed == crash["killed"] == list(WORKERS)


@pytest.mark.parametrize(
    ("runs", "problem"),
    [
        ((UNDISTURBED, UNDISTURBED), "no stream was on a killed worker"),
        ((CHANGED,), "4 of 4 streams have other tokens"),
        ((LOST,), "4 of 4 streams have other tokens"),
    ],
    ids=["nothing recovered", "changed", "lost"],
)
async def test_a_crash_that_shows_nothing_or_damage_fails(
    runs: Sequence[Sequence[Step]], problem: str
) -> None:
    with pytest.raises(CommandFailed, match=problem):
        await crash_of(*runs)


async def test_a_stream_that_fails_ends_the_crash_with_its_error() -> None:
    with pytest.raises(errors.EngineFailed, match="lost"):
        await crash_of([Fail(errors.EngineFailed("lost"))])


async def test_trace_is_drawn_as_a_waterfall(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as (_, address), AsyncClient(address) as client:
        described = await draw_trace(client, "req-1")
    assert described["request_id"] == "req-1"
    assert "   decode" in capsys.readouterr().out


async def test_mesh_without_the_shipped_models_is_refused(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_MODELS", '[{"name": "small", "path": "builtin:small"}]')
    ran = await cli("demo")
    assert (ran.code, ran.err) == (
        1,
        "sluice: SETUP: models: large missing; unset SLUICE_MODELS for the demo\n",
    )
