"""Batches of Ray Data, errors, and a killed actor."""

import asyncio
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sluice.client import Client, RetryPolicy
from sluice.errors import EngineFailed, ModelUnavailable, PromptTooLong, SluiceError
from sluice.ray import COLUMNS, Generate
from tests.support.scripted import Fail, ScriptedService, delta, finished, started

WHOLE = [started(), delta(0, "abc"), finished()]


async def generate(batch: Any, scripts: Any = (WHOLE,), **options: Any) -> Any:
    async with ScriptedService.serve(scripts) as service:
        step = Generate("say {text}", service.address, at_once=1, **options)
        found = await asyncio.to_thread(step, batch)
        assert [one.prompt for one in service.requests] == ["say a", "say b"]
    return found


async def test_a_mapping_of_arrays() -> None:
    np = pytest.importorskip("numpy")
    found = await generate({"id": np.array([1, 2]), "text": np.array(["a", "b"])}, prefix="s_")
    assert list(found) == ["id", "text", *(f"s_{name}" for name in COLUMNS)]
    assert list(found["s_answer"]) == ["abc", "abc"]


async def test_an_error_of_a_row_is_in_its_column() -> None:
    pytest.importorskip("numpy")
    found = await generate({"text": ["a", "b"]}, [WHOLE, [Fail(PromptTooLong("long"))]])
    assert list(found["completion_tokens"]) == [3, None]
    assert list(found["error"]) == [None, "PROMPT_TOO_LONG: long"]


async def test_an_empty_batch() -> None:
    pytest.importorskip("numpy")
    step = Generate("say {text}", "127.0.0.1:1")
    assert list(step({"text": []})) == ["text", *COLUMNS]


@pytest.mark.parametrize("error", [ModelUnavailable("not now"), EngineFailed("broken")])
async def test_what_may_pass_fails_the_batch(
    error: SluiceError, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numpy")
    soon = RetryPolicy(first_wait_s=0.01, wait_s_max=0.05)
    monkeypatch.setattr("sluice.ray.Client", partial(Client, retry=soon))
    try:
        found = await generate({"text": ["a", "b"]}, [WHOLE, *[[Fail(error)]] * 9])
    except (ModelUnavailable, AssertionError):
        assert isinstance(error, ModelUnavailable)
    else:
        assert found["error"][1] == "ENGINE_FAILED: broken"


KILLED = """
import os, sys, ray
from sluice.ray import Generate

class Dies(Generate):
    def __call__(self, batch):
        found = super().__call__(batch)
        if 40 in list(batch["id"]) and not os.path.exists(flag):
            open(flag, "w").close()
            os._exit(1)
        return found

address, flag = sys.argv[1:]

class Configured(Dies):
    def __init__(self):
        super().__init__("say {id}", address, at_once=4)

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
rows = ray.data.from_items([{"id": n} for n in range(80)])
rows = rows.map_batches(Configured, batch_size=10, concurrency=2).take_all()
assert sorted(row["id"] for row in rows) == list(range(80)), len(rows)
assert {row["answer"] for row in rows} == {"abc"}
assert os.path.exists(flag), "an actor was killed"
"""


@pytest.mark.long
@pytest.mark.skipif(not (find_spec("ray") and find_spec("pandas")), reason="needs ray[data]")
async def test_rows_of_a_killed_actor_are_there_once(tmp_path: Path) -> None:
    script = tmp_path / "pipeline.py"
    script.write_text(KILLED)
    async with ScriptedService.serve([WHOLE]) as service:
        command = [sys.executable, str(script), service.address, str(tmp_path / "flag")]
        ran = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=150
        )
    assert ran.returncode == 0, ran.stderr[-2000:]
