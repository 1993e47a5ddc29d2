"""`sluice demo`: what it shows of a mesh."""

import pytest

from cli.demo import PROMPTS, ask_all
from cli.failure import CommandFailed
from sluice import errors
from tests.support.scripted import Fail, ScriptedService, delta, finished, started

SCRIPT = [started(), delta(0, "abc"), finished()]


async def test_every_model_answers_every_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    async with ScriptedService.serve([SCRIPT]) as service:
        answers = await ask_all(service.address, ["small", "large"])
    asked = [(request.prompt, request.model) for request in service.requests]
    assert asked == [(prompt, model) for prompt in PROMPTS for model in ("small", "large")]
    assert [answer["text"] for answer in answers] == ["abc"] * len(asked)
    shown = capsys.readouterr().out
    assert shown.count("small: abc\n") == len(PROMPTS)
    assert shown.count("large: abc\n") == len(PROMPTS)
    assert shown.count("trace 0af7651916cd43dd8448eb211c80319c") == len(asked)
    assert "first token 2 ms · total 4 ms" in shown


async def test_prompt_without_an_answer_fails_it() -> None:
    async with ScriptedService.serve([[Fail(errors.EngineFailed("lost"))], SCRIPT]) as service:
        with pytest.raises(CommandFailed, match="1 of 4 prompts got no answer: lost") as caught:
            await ask_all(service.address, ["small"])
    assert len(caught.value.done["answers"]) == len(PROMPTS) - 1
