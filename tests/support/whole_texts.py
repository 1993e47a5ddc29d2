"""Embeddings and scores of texts, as gateway and worker compute them together."""

from pathlib import Path
from typing import Any

import numpy as np

from gateway.admission.text_prompts import embed_prompts, rerank_prompts
from gateway.config.models import ModelFolder
from gateway.models.catalog import ServedModel
from gateway.validation.conversation import Conversation
from model_workers.engine.protocol import Sampling, SequenceSpec
from model_workers.engine.values import load_values
from sluice.internal.v1 import task_pb2
from sluice.settings import ModelSettings
from sluice.v1.inference_pb2 import EmbedRequest
from tests.support.settings import tuned


def settings_of(folder: Path, engine: str) -> ModelSettings:
    """Of a model on the CPU."""
    return tuned(
        ModelSettings,
        name="m",
        path=str(folder),
        engine=engine,
        device="cpu",
        max_waiting_rows=1000,
    )


def computed(settings: ModelSettings, request: Any, said: list[str]) -> Any:
    """The numbers [texts, size]; ``said``: the texts, or the query and the documents."""
    folder = ModelFolder(settings)
    model = ServedModel(settings, folder.tokenizer, "", folder.sentence)
    if isinstance(request, EmbedRequest):
        rows = embed_prompts(request, Conversation((), True, documents=tuple(said)), model)
    else:
        query, *documents = said
        texts = Conversation((), True, query=query, documents=tuple(documents))
        rows = rerank_prompts(request, texts, model)
    engine, found = load_values(settings), {}
    for number, row in enumerate(rows):
        assert row.values is not None
        values = task_pb2.Values(
            dimensions=row.values.dimensions, second_text=row.values.second_text
        )
        prompt = tuple(row.prompt_token_ids)
        engine.add(SequenceSpec(str(number), "b", 0, prompt, (), Sampling(1), values=values), 0.0)
    while engine.has_sequences():
        for step in engine.step(0.0):
            assert not step.error, step.error
            found[int(step.request_id)] = np.frombuffer(step.values, "<f4")
    return np.stack([found[number] for number in range(len(rows))])


def cosine(a: Any, b: Any) -> Any:
    """Of each pair of rows."""
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
