"""Serves `sluice.v1.InferenceService`."""

import time
from collections.abc import Sequence
from functools import partial

from gateway.api.batch import answer_batch
from gateway.api.count import count_tokens
from gateway.api.generate import Generator
from gateway.api.methods import GrpcCall
from gateway.api.texts import EMBED, RERANK, SCORE, respond
from gateway.api.whole import answer_text
from gateway.streaming.load_table import ModelLoadTable
from sluice.errors import InvalidRequest
from sluice.v1 import inference_pb2 as pb


class InferenceService:
    """Answers requests to models; most methods are functions of their modules."""

    def __init__(self, generator: Generator, loads: ModelLoadTable) -> None:
        """Answer by `generator`; `loads` are those of the models."""
        self._generator = generator
        self._loads = loads
        self.Generate = generator.stream
        self.GenerateText = partial(answer_text, generator)
        self.GenerateBatch = partial(answer_batch, generator)
        self.Embed = partial(respond, generator, EMBED)
        self.Rerank = partial(respond, generator, RERANK)
        self.Score = partial(respond, generator, SCORE)
        self.CountTokens = partial(count_tokens, generator)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: GrpcCall
    ) -> pb.ListModelsResponse:
        """See the proto."""
        now = time.monotonic()
        names, next_page = _page_of(
            self._generator.catalog.names, request.page_size, request.page_token
        )
        models = [self._model(name, now) for name in names]
        return pb.ListModelsResponse(models=models, next_page_token=next_page)

    def _model(self, name: str, now: float) -> pb.Model:
        model = self._generator.catalog[name]
        load = self._loads.load(model.task_name, now)
        return pb.Model(
            name=name,
            tier=model.settings.tier,
            context_tokens=model.context_tokens,
            ready=self._generator.upstream.overload.is_ready(name, model.task_name, now),
            slots=load.slots,
            running=load.running,
            queued=load.queued,
        )


def _page_of(names: Sequence[str], size: int, token: str) -> tuple[Sequence[str], str]:
    """Return a page (AIP-158) of at most `size` names, 0 for all, and the token of the next page.

    A token is the number of the page's first entry.

    Raises:
        InvalidRequest: The token is invalid.
    """
    if token and not (token.isascii() and token.isdecimal() and len(token) < 10):
        raise InvalidRequest.of(
            "page_token", "is invalid: use next_page_token of the previous page"
        )
    start = int(token or 0)
    end = start + size if size else len(names)
    return names[start:end], str(end) if end < len(names) else ""
