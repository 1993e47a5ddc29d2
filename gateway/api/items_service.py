"""Serves `sluice.internal.v1.ItemsService`: the items of a job are requests as every other."""

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from gateway.admission.request_context import Call, ItemCall, fail_with
from gateway.api.generate import Generator
from gateway.api.methods import GrpcCall
from gateway.api.texts import EMBED, answer_texts
from gateway.api.whole import cost_of, whole_answer
from gateway.identity.caller import Caller
from gateway.streaming.model_run import ModelRun
from gateway.validation.requests import class_of
from sluice.defaults import AUTO
from sluice.errors import UnknownModel
from sluice.internal.v1.items_pb2 import (
    FindTokenEndsRequest,
    FindTokenEndsResponse,
    ItemWork,
    RunRequest,
    RunResponse,
)
from sluice.v1.inference_pb2 import EmbedRequest, ModelUsage
from sluice.wire.clock import ms_of
from sluice.wire.groups import GroupWriter
from sluice.wire.subjects import BULK_CLASS

PADDING_MAX: Final = 0.9999
"""Largest padding share of a batch that is counted: no batch is only padding."""
AT_A_TIME: Final = 4
"""Items that begin in succession while the gateway is quiet: the second finds its code in the processor's caches."""
QUIET_S: Final = 0.5
"""How long no other call must have come until the gateway counts as quiet, in seconds."""


class ItemsService:
    """Answers items. Items above the limit for one tenant's bulk calls are not read, and wait at the sender."""

    def __init__(self, generator: Generator, caller_of: Callable[[Caller], Caller]) -> None:
        """Answer by `generator`.

        Args:
            generator: Answers requests.
            caller_of: Returns a caller with the limits that the key of its job has now; raises Unauthenticated if that
                has ended.
        """
        self._generator = generator
        self._caller_of = caller_of
        self._slots = asyncio.Semaphore(generator.limiter.tenant_limits[-1])

    # A coroutine that writes: see `Generator.stream`.
    async def Run(self, requests: Any, context: GrpcCall) -> None:
        """See the proto."""
        writer, pacer = GroupWriter[RunResponse](context.write), self._generator.limiter.pacer
        async with asyncio.TaskGroup() as group:
            async for message in requests:
                for request in (message, *message.more):
                    await self._slots.acquire()
                    group.create_task(self._run(request, context, writer))
                    # Other calls go on meanwhile.
                    if request.id % AT_A_TIME and time.monotonic() > pacer.arrived_at + QUIET_S:
                        await asyncio.sleep(0)
                    else:
                        await pacer.wait(is_bounded=False)

    async def FindTokenEnds(
        self, request: FindTokenEndsRequest, context: GrpcCall
    ) -> FindTokenEndsResponse:
        """See the proto."""
        catalog = self._generator.catalog
        name = catalog.default if request.model in ("", AUTO) else request.model
        if name not in catalog.answering:
            raise UnknownModel(f"no model {name!r}")
        tokenizer = catalog[name].tokenizer
        tenant = context.caller.tenant
        async with self._generator.limiter.preparing(BULK_CLASS, tenant):
            ends = await self._generator.admission.preparation.threads.run(
                tenant, partial(tokenizer.token_ends, request.text)
            )
        return FindTokenEndsResponse(ends=ends)

    async def _run(
        self, request: RunRequest, call: GrpcCall, writer: GroupWriter[RunResponse]
    ) -> None:
        timeout_s = ms_of(request.timeout) / 1e3 if request.HasField("timeout") else None
        item = ItemCall(call.caller, call.metadata, timeout_s)
        try:
            response = await fail_with(self._answer(request, item), item.fail, item)
        finally:
            self._slots.release()
        if item.error is not None:  # one bad item must not end the call of others
            response = RunResponse(id=request.id, error=item.error.to_status().SerializeToString())
        assert response is not None, "it has an error otherwise"
        await writer.write(response)

    async def _answer(self, request: RunRequest, item: Call) -> RunResponse:
        message = request.embed if request.HasField("embed") else request.request
        item.caller = self._caller_of(item.caller)
        catalog = self._generator.catalog
        with self._generator.limiter.running(class_of(message), item.caller.tenant):
            if isinstance(message, EmbedRequest):
                response, log = await answer_texts(self._generator, EMBED, message, item)
                return RunResponse(
                    id=request.id,
                    embedded=response,
                    work=work_of(log.runs or ()),
                    cost=cost_of(catalog, [ModelUsage(model=response.model, usage=response.usage)]),
                )
            answer, log = await whole_answer(self._generator, message, item)
        answer.ClearField("token_ids")
        cost = cost_of(catalog, answer.finished.attempts)
        return RunResponse(id=request.id, answer=answer, cost=cost, work=work_of(log.runs or ()))


def work_of(runs: Iterable[ModelRun]) -> list[ItemWork]:
    """Return what the runs of an item took of each worker that ended one."""
    by_worker: dict[str, ItemWork] = {}
    for run in runs:
        if run.final is None or not run.final.HasField("batch"):
            continue
        batch, timings = run.final.batch, run.final.timings
        work = by_worker.setdefault(batch.worker, ItemWork(worker=batch.worker))
        tokens = run.prompt_tokens + run.resumed
        work.tokens += tokens
        work.cells += round(tokens / (1 - min(batch.padding_share, PADDING_MAX)))
        work.computing_ms = max(work.computing_ms, timings.prefill_ms + timings.decode_ms)
    return list(by_worker.values())
