"""A model that only transformers computes rightly, through a whole mesh: batches by length, and a killed worker."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from sluice import settings as config
from sluice.client import AsyncClient, Delta, Notice
from supervisor.mesh import Mesh, running_mesh
from tests.mesh.test_remote import record_of
from tests.support.generating_models import END, save, tiny
from tests.support.mesh import quick_settings, stubs_of

pytestmark = [pytest.mark.mesh, pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

TIMEOUT_S = 90.0
TOKENS = 12
LONG = 200
SHORT_PROMPTS = [" ".join(f"w{n + k}" for k in range(4)) for n in range(5, 13)]
LONG_PROMPTS = [" ".join(f"w{n + k}" for k in range(40)) for n in range(5, 13)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("diffllama"), "diffllama")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(folder: Path) -> AsyncIterator[Mesh]:
    settings = quick_settings(
        config.ModelSettings(name="m", path=str(folder), engine="generate", slots=16),
        batcher=config.BatcherSettings.model_validate(
            {"policy": {"padding_max": 0.05}, "drain_s": 1.0}
        ),
    )
    async with running_mesh(settings) as running:
        yield running


def expected(prompt: str, tokens: int) -> list[int]:
    """What transformers generates for the prompt alone, without the end token."""
    ids = torch.tensor([[int(word[1:]) for word in prompt.split()]])
    answer = tiny("diffllama").generate(
        ids, max_new_tokens=tokens, do_sample=False, eos_token_id=[], bad_words_ids=[[END]]
    )
    return [int(token) for token in answer[0, ids.shape[1] :]]


async def test_prompts_of_like_length_are_one_padded_batch(mesh: Mesh) -> None:
    prompts = [prompt for pair in zip(SHORT_PROMPTS, LONG_PROMPTS, strict=True) for prompt in pair]
    asked = {"raw_prompt": True, "max_tokens": TOKENS, "min_tokens": TOKENS}
    async with AsyncClient(mesh.address) as client:
        answers = await asyncio.gather(*(client.generate(p, **asked).answer() for p in prompts))
        records = [await record_of(client, answer.request_id) for answer in answers]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert list(answer.token_ids) == expected(prompt, TOKENS)
    attempts = [record.attempts[-1] for record in records]
    assert max(one.batch_rows for one in attempts) > 1
    assert {one.padding_share for one in attempts} == {0}


async def test_killed_worker_changes_no_token(mesh: Mesh) -> None:
    begun, recovered = asyncio.Event(), list[str]()

    async def read(client: AsyncClient, prompt: str) -> list[int | None]:
        token_ids: list[int | None] = []
        asked = {"raw_prompt": True, "max_tokens": LONG, "min_tokens": LONG}
        async with client.generate(prompt, timeout_s=TIMEOUT_S, **asked) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    token_ids += event.token_ids
                    begun.set()
                elif isinstance(event, Notice):
                    recovered.append(prompt)
        return token_ids

    async with AsyncClient(mesh.address) as client:
        reading = [asyncio.ensure_future(read(client, prompt)) for prompt in SHORT_PROMPTS]
        await asyncio.wait_for(begun.wait(), TIMEOUT_S)
        os.kill(stubs_of(mesh)["m"], signal.SIGKILL)
        answers = await asyncio.gather(*reading)
    assert recovered
    assert answers == [expected(prompt, LONG) for prompt in SHORT_PROMPTS]
