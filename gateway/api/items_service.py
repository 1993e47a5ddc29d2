"""``sluice.internal.v1.ItemsService``: the items of a job take the way of every other request."""

import asyncio
import logging
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from gateway.api.generate import Generator
from gateway.api.inference_service import whole_answer
from gateway.api.interceptor import abort
from gateway.api.metadata import metadata_of
from gateway.api.texts import TextCalls
from gateway.identity.caller import current_caller
from gateway.validation.requests import class_of
from sluice.defaults import AUTO
from sluice.errors import InternalError, SluiceError, UnknownModel
from sluice.internal.v1.items_pb2 import (
    FindTokenEndsRequest,
    FindTokenEndsResponse,
    RunRequest,
    RunResponse,
)
from sluice.internal.v1.items_pb2_grpc import ItemsServiceServicer
from sluice.v1.inference_pb2 import EmbedRequest, Finished
from sluice.wire.clock import ms_of

_log = logging.getLogger(__name__)


class ItemsService(ItemsServiceServicer):
    """Answers items. Those above the limit for one tenant's bulk calls are not read, and wait at the sender."""

    def __init__(self, generator: Generator, texts: TextCalls) -> None:
        self._generator = generator
        self._texts = texts
        self._catalog = generator.upstream.admission.catalog
        self._facts = self._catalog.facts
        limits = generator.settings
        most = limits.max_concurrent_requests * limits.shares.bulk * limits.shares.tenant
        self._slots = asyncio.Semaphore(math.ceil(most))

    # A coroutine that writes: see InferenceService.Generate.
    async def Run(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        """See the proto."""
        answers: asyncio.Queue[RunResponse | None] = asyncio.Queue()
        metadata = metadata_of(context)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._take(requests, metadata, answers))
                while (answer := await answers.get()) is not None:
                    await context.write(answer)
        except SluiceError as error:
            await abort(context, error)

    async def FindTokenEnds(
        self, request: FindTokenEndsRequest, context: Any
    ) -> FindTokenEndsResponse:
        """See the proto."""
        name = self._catalog.default if request.model in ("", AUTO) else request.model
        if name not in self._catalog.answering:
            raise UnknownModel(f"no model {name!r}")
        tokenizer = self._catalog[name].tokenizer
        tenant = current_caller().tenant
        async with self._generator.limiter.slot("bulk", tenant):
            run = self._generator.upstream.admission.threads.run
            ends = await run(tenant, partial(tokenizer.token_ends, request.text))
        return FindTokenEndsResponse(ends=ends)

    async def _take(
        self,
        requests: Any,
        metadata: Mapping[str, str],
        answers: "asyncio.Queue[RunResponse | None]",
    ) -> None:
        async with asyncio.TaskGroup() as group:
            async for request in requests:
                await self._slots.acquire()
                group.create_task(self._run(request, metadata, answers))
        answers.put_nowait(None)

    async def _run(
        self,
        request: RunRequest,
        metadata: Mapping[str, str],
        answers: "asyncio.Queue[RunResponse | None]",
    ) -> None:
        try:
            answers.put_nowait(await self._answer(request, metadata))
        finally:
            self._slots.release()

    async def _answer(self, request: RunRequest, metadata: Mapping[str, str]) -> RunResponse:
        remaining_s = ms_of(request.timeout) / 1e3 if request.HasField("timeout") else None
        asked = request.embed if request.HasField("embed") else request.request
        try:
            with self._generator.limiter.call(class_of(asked), current_caller().tenant):
                if isinstance(asked, EmbedRequest):
                    return await self._embedded(request.id, asked, remaining_s, metadata)
                answer = await whole_answer(
                    self._generator, request.request, remaining_s, metadata, is_item=True
                )
        except SluiceError as error:
            return RunResponse(id=request.id, error=error.to_status().SerializeToString())
        except Exception:  # one bad item must not end the call of all others
            _log.exception("an item failed")
            failed = InternalError("the gateway failed; its log has the reason")
            return RunResponse(id=request.id, error=failed.to_status().SerializeToString())
        answer.ClearField("token_ids")
        return RunResponse(id=request.id, answer=answer, cost=self._cost(answer.finished))

    async def _embedded(
        self, id: int, asked: EmbedRequest, remaining_s: float | None, metadata: Mapping[str, str]
    ) -> RunResponse:
        found = await self._texts.embed(asked, remaining_s, metadata, is_item=True)
        cost = self._facts[found.model].cost(found.usage.prompt_tokens, 0)
        return RunResponse(id=id, embedded=found, cost=cost)

    def _cost(self, finished: Finished) -> float:
        return sum(
            self._facts[one.model].cost(
                one.usage.prompt_tokens, one.usage.completion_tokens - one.usage.resumed_tokens
            )
            for one in finished.attempts
        )
