"""Serves `sluice.v1.InferenceService`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.api.batch import answer_batch
from gateway.api.count import count_tokens
from gateway.api.generate import Generator, Stream
from gateway.api.methods import GrpcCall
from gateway.api.texts import EMBED, RERANK, SCORE, answer_texts
from gateway.api.whole import whole_answer
from gateway.streaming.load_table import ModelLoadTable
from sluice.errors import InvalidRequest
from sluice.v1 import inference_pb2 as pb


@dataclass(frozen=True, eq=False)
class InferenceService:
    """Answers requests to models.

    Attributes:
        generator: Answers requests.
        loads: Loads of the models.
    """

    generator: Generator
    loads: ModelLoadTable

    @property
    def Generate(self) -> Stream:
        """See the proto."""
        return self.generator.stream

    async def GenerateText(
        self, request: pb.GenerateRequest, context: GrpcCall
    ) -> pb.GenerateTextResponse:
        """See the proto."""
        answer, _ = await whole_answer(self.generator, request, context)
        return answer

    async def GenerateBatch(
        self, request: pb.GenerateBatchRequest, context: GrpcCall
    ) -> pb.GenerateBatchResponse:
        """See the proto."""
        return await answer_batch(self.generator, request, context)

    async def Embed(self, request: pb.EmbedRequest, context: GrpcCall) -> pb.EmbedResponse:
        """See the proto."""
        response, _ = await answer_texts(self.generator, EMBED, request, context)
        return response

    async def Rerank(self, request: pb.RerankRequest, context: GrpcCall) -> pb.RerankResponse:
        """See the proto."""
        response, _ = await answer_texts(self.generator, RERANK, request, context)
        return response

    async def Score(self, request: pb.ScoreRequest, context: GrpcCall) -> pb.ScoreResponse:
        """See the proto."""
        response, _ = await answer_texts(self.generator, SCORE, request, context)
        return response

    async def CountTokens(
        self, request: pb.CountTokensRequest, context: GrpcCall
    ) -> pb.CountTokensResponse:
        """See the proto."""
        return await count_tokens(self.generator, request, context)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: GrpcCall
    ) -> pb.ListModelsResponse:
        """See the proto."""
        now = time.monotonic()
        names, next_page = _page_of(
            self.generator.catalog.names, request.page_size, request.page_token
        )
        models = [self._model(name, now) for name in names]
        return pb.ListModelsResponse(models=models, next_page_token=next_page)

    def _model(self, name: str, now: float) -> pb.Model:
        model = self.generator.catalog[name]
        load = self.loads.load(model.settings.task_name, now)
        return pb.Model(
            name=name,
            tier=model.settings.tier,
            context_tokens=model.context_tokens,
            ready=self.generator.upstream.overload.is_ready(name, model.settings.task_name, now),
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
