"""A gateway that answers items as a test says."""

import asyncio
import re
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

import grpc

from sluice.errors import SluiceError
from sluice.internal.v1.items_pb2 import FindTokenEndsResponse, ItemWork, RunRequest, RunResponse
from sluice.internal.v1.items_pb2_grpc import (
    ItemsServiceServicer,
    add_ItemsServiceServicer_to_server,
)
from sluice.v1 import inference_pb2 as pb
from sluice.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from sluice.wire.groups import GroupWriter

Plan = Callable[[str, int], SluiceError | None]
"""The error of the n-th try (from 1) of a prompt; None: it is answered."""


class GatewayDouble(ItemsServiceServicer, InferenceServiceServicer):
    """Answers a prompt with itself in capitals; one token a word.

    Attributes:
        asked: how often each prompt came.
        plan: which of them fail.
        context: tokens of prompt and answer.
        answer: of a prompt.
        hold: set: answers go; cleared: they wait, those of prompts that are `held`.
        in_flight_most: of all items at the same time.
        split_errors: of the next calls of FindTokenEnds, the last one first.
        work: what each item took of a worker; None: nothing is known.
        keys: API keys that calls of items named.
    """

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.requests: list[pb.GenerateRequest] = []
        self.plan: Plan = lambda prompt, tries: None
        self.hold = asyncio.Event()
        self.hold.set()
        self.held: Callable[[str], bool] = lambda prompt: True
        self.in_flight = self.in_flight_most = 0
        self.context = 1000
        self.answer: Callable[[str], str] = str.upper
        self.tenants: set[str] = set()
        self.keys: set[str] = set()
        self.cached_tokens = 0
        self.split_errors: list[grpc.StatusCode] = []
        self.work: ItemWork | None = None

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        add_ItemsServiceServicer_to_server(self, self._server)
        add_InferenceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.hold.set()
        await self._server.stop(0)

    async def ListModels(self, request: Any, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(name="echo")])

    async def CountTokens(self, request: Any, context: Any) -> pb.CountTokensResponse:
        assert request.prompt.strip(), "a gateway refuses an empty prompt"
        count = len(request.prompt.split())
        return pb.CountTokensResponse(token_count=count, context_tokens=self.context, model="echo")

    async def FindTokenEnds(self, request: Any, context: Any) -> FindTokenEndsResponse:
        if self.split_errors:
            await context.abort(self.split_errors.pop(), "not now")
        ends = [match.end() for match in re.finditer(r"\s*\S+", request.text)]
        return FindTokenEndsResponse(ends=ends)

    async def Run(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        metadata = dict(context.invocation_metadata())
        self.tenants.add(metadata["sluice-tenant"])
        self.keys.add(metadata.get("sluice-key-id", ""))
        writer = GroupWriter[RunResponse](context.write)
        async with asyncio.TaskGroup() as group:
            async for message in requests:
                for request in (message, *message.more):
                    group.create_task(self._answer(request, writer))

    async def _answer(self, request: RunRequest, writer: GroupWriter[RunResponse]) -> None:
        prompt = request.embed.texts[0] if request.HasField("embed") else request.request.prompt
        self.asked[prompt] += 1
        self.requests.append(request.request)
        self.in_flight += 1
        self.in_flight_most = max(self.in_flight, self.in_flight_most)
        try:
            if self.held(prompt):
                await self.hold.wait()
        finally:
            self.in_flight -= 1
        response = self._response(request, self.plan(prompt, self.asked[prompt]))
        with suppress(Exception):  # the caller has been killed
            await writer.write(response)

    def _response(self, request: RunRequest, error: SluiceError | None) -> RunResponse:
        if error is not None:
            return RunResponse(id=request.id, error=error.to_status().SerializeToString())
        if request.HasField("embed"):
            found = pb.EmbedResponse(model=request.embed.model)
            found.usage.prompt_tokens = len(request.embed.texts)
            for text in request.embed.texts:
                found.embeddings.add(values=array("f", [len(text)]).tobytes())
            return RunResponse(id=request.id, embedded=found, cost=0.5)
        prompt = request.request.prompt
        usage = pb.Usage(prompt_tokens=len(prompt.split()), completion_tokens=2)
        usage.cached_prompt_tokens = self.cached_tokens
        answer = pb.GenerateTextResponse(text=self.answer(prompt))
        answer.started.model = "echo"
        answer.finished.CopyFrom(
            pb.Finished(reason=pb.FINISH_REASON_STOP, usage=usage, model="echo")
        )
        work = () if self.work is None else (self.work,)
        return RunResponse(id=request.id, answer=answer, cost=0.5, work=work)
