"""Embeddings, rerank and scores through a real mesh; a worker and a batcher are killed while a list is computed."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModel

from sluice import settings as config
from sluice.client import AsyncClient
from supervisor.mesh import Mesh, running_mesh
from tests.support.mesh import kill, quick_settings, stubs_of, until_counted
from tests.support.tiny_encoders import config_of, ids_of, save_reranker, save_transformer, texts

pytestmark = [pytest.mark.mesh, pytest.mark.long]

LAYERS = 24
"""So many that a list takes seconds."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    encoder, reranker = (tmp_path_factory.mktemp(name) for name in ("encoder", "reranker"))
    save_transformer(encoder, config_of("bert", num_hidden_layers=LAYERS))
    return encoder, save_reranker(reranker)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(folders: tuple[Path, Path]) -> AsyncIterator[Mesh]:
    encoder, reranker = map(str, folders)
    settings = quick_settings(
        config.ModelSettings(name="small", path="builtin:small"),
        config.ModelSettings(name="embed", path=encoder, engine="embedding"),
        config.ModelSettings(name="rank", path=reranker, engine="reranker"),
    )
    async with running_mesh(settings) as running:
        yield running


@pytest.mark.asyncio(loop_scope="module")
async def test_a_list_survives_the_loss_of_worker_and_batcher(
    mesh: Mesh, folders: tuple[Path, Path]
) -> None:
    said = texts(600, seed=5)
    async with AsyncClient(mesh.address) as client:
        calm = np.array((await client.embed(said, priority="standard")).vectors)
        asking = asyncio.ensure_future(client.embed(said, priority="standard"))
        await until_counted(client, "sluice.rows.in_flight", "embed")
        os.kill(stubs_of(mesh)["embed"], signal.SIGKILL)
        await until_counted(client, "sluice.rows.resent", "embed")
        assert not asking.done()
        kill(mesh, "batcher")
        disturbed = np.array((await asking).vectors)
    assert np.abs(calm - disturbed).max() < 1e-5
    model: Any = AutoModel.from_pretrained(folders[0]).eval()
    for text, ours in list(zip(ids_of(folders[0], said), calm, strict=True))[::60]:
        with torch.inference_mode():
            theirs = model(torch.tensor([text])).last_hidden_state[0].mean(0).numpy()
        assert np.abs(ours - theirs).max() < 1e-4


@pytest.mark.asyncio(loop_scope="module")
async def test_rerank_and_score_answer(mesh: Mesh) -> None:
    async with AsyncClient(mesh.address) as client:
        ranking = await client.rerank("w1 w2", texts(30, most=20), top_n=5)
        scores = await client.score(["3 7 12", "12 7 3"], "Sort: 7 3 12", model="small")
    found = [one.score for one in ranking.results]
    assert len(found) == 5
    assert found == sorted(found, reverse=True)
    right, wrong = scores.answers
    assert right.logprob == pytest.approx(sum(right.logprobs), abs=1e-4)
    assert len(right.token_ids) == len(right.logprobs) > 0
    assert wrong.logprob < 0
