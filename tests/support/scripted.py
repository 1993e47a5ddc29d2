"""A real gRPC server with scripted answers, for tests of clients.

    async with ScriptedService.serve([[started(), delta(0, "a"), Fail(Overloaded("full")), ...]]) as service:
        service.address, service.requests

Each list is what one call of Generate does, in order of the calls; the last list serves all further calls too.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection

from sluice.errors import SluiceError
from sluice.v1 import inference_pb2 as pb
from sluice.v1 import inference_pb2_grpc, safety_pb2, safety_pb2_grpc
from sluice.wire.clock import duration

SERVICE = "sluice.v1.InferenceService"


@dataclass(frozen=True)
class Fail:
    """Ends the call with a typed error, or with a bare status that is not ours."""

    error: SluiceError | None = None
    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    details: str = ""


@dataclass
class Hold:
    """Tells that the call is here, then waits until `release` is set; `cancelled` is set when the caller goes."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


Step = pb.GenerateResponse | Fail | Hold


def started(model: str = "small", seed: int = 7, request_id: str = "r1") -> pb.GenerateResponse:
    """The first event."""
    route = pb.Route(tier=model, strategy=pb.ROUTE_STRATEGY_RULES, reason="default")
    return pb.GenerateResponse(
        started=pb.Started(
            request_id=request_id,
            trace_id="0af7651916cd43dd8448eb211c80319c",
            model=model,
            route=route,
            seed=seed,
            prompt_tokens=5,
        )
    )


def delta(index: int, text: str, token_ids: Sequence[int] | None = None) -> pb.GenerateResponse:
    """A piece with one token per character, unless told; a token's id is 100 and its index."""
    ids = range(100 + index, 100 + index + len(text)) if token_ids is None else token_ids
    return pb.GenerateResponse(delta=pb.Delta(text=text, token_ids=ids, index=index))


def finished(
    tokens: int = 3,
    reason: "pb.FinishReason" = pb.FINISH_REASON_STOP,
    legs: Mapping[str, int] | None = None,
) -> pb.GenerateResponse:
    """The last event; ``legs`` are answer tokens by model, of which the last one has the answer."""
    by_model = list((legs or {}).items())
    return pb.GenerateResponse(
        finished=pb.Finished(
            reason=reason,
            usage=pb.Usage(prompt_tokens=5, completion_tokens=tokens),
            timings=pb.Timings(time_to_first_token=duration(1.5), total=duration(4.25)),
            model=by_model[-1][0] if by_model else "",
            attempts=[
                pb.ModelUsage(model=model, usage=pb.Usage(prompt_tokens=5, completion_tokens=count))
                for model, count in by_model
            ],
        )
    )


class ScriptedService(
    inference_pb2_grpc.InferenceServiceServicer, safety_pb2_grpc.SafetyServiceServicer
):
    """Plays its scripts and notes what was asked.

    Attributes:
        requests: of Generate, in order.
        metadata: of each of them.
        timeouts: seconds that each had left, None without a deadline.
        lookup_failures: errors for the next calls of ListModels and CountTokens.
    """

    def __init__(self, scripts: Iterable[Sequence[Step]]) -> None:
        self.address = ""
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.timeouts: list[float | None] = []
        self.lookup_failures: list[Fail] = []
        self.scripts = list(scripts)

    @classmethod
    @asynccontextmanager
    async def serve(
        cls, scripts: Iterable[Sequence[Step]] = (), address: str = "127.0.0.1:0"
    ) -> "AsyncIterator[ScriptedService]":
        """Serves on a free port, with reflection, until the block ends."""
        service = cls(scripts)
        server = grpc.aio.server()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
        safety_pb2_grpc.add_SafetyServiceServicer_to_server(service, server)
        reflection.enable_server_reflection((SERVICE, reflection.SERVICE_NAME), server)
        port = server.add_insecure_port(address)
        service.address = f"127.0.0.1:{port}"
        await server.start()
        try:
            yield service
        finally:
            await server.stop(None)

    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        """The next script."""
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        self.timeouts.append(context.time_remaining())
        steps = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        for step in steps:
            match step:
                case Fail():
                    await _abort(context, step)
                case Hold():
                    await _hold(step)
                case _:
                    yield step

    async def CountTokens(  # type: ignore[override]
        self, request: pb.CountTokensRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.CountTokensResponse:
        """One token per character."""
        await self._fail_lookup(context)
        text = request.prompt or "".join(m.content for m in request.chat.messages)
        return pb.CountTokensResponse(
            token_count=len(text), context_tokens=512, model=request.model
        )

    async def ListModels(  # type: ignore[override]
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListModelsResponse:
        """Two models, the second of which is not ready."""
        await self._fail_lookup(context)
        return pb.ListModelsResponse(
            models=[
                pb.Model(name="small", tier="small", context_tokens=512, ready=True, slots=32),
                pb.Model(name="large", tier="large", context_tokens=512, ready=False, slots=16),
            ]
        )

    async def CheckText(  # type: ignore[override]
        self, request: safety_pb2.CheckTextRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> safety_pb2.CheckTextResponse:
        """Blocks "bad", and redacts the first character of anything else; the labels are in the policy."""
        await self._fail_lookup(context)
        blocked = request.text == "bad"
        action = safety_pb2.SAFETY_ACTION_BLOCK if blocked else safety_pb2.SAFETY_ACTION_REDACT
        finding = safety_pb2.SafetyFinding(
            rule="pii.iban", severity=safety_pb2.SAFETY_SEVERITY_HIGH, action=action, start=0, end=1
        )
        return safety_pb2.CheckTextResponse(
            normalized_text=request.text,
            text="" if blocked else f"<IBAN_1>{request.text[1:]}",
            findings=[finding] if request.text else [],
            policy=f"default@1 {dict(request.labels)}",
            blocked=blocked,
        )

    async def GetDryRun(  # type: ignore[override]
        self, request: safety_pb2.GetDryRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> safety_pb2.GetDryRunResponse:
        """Two texts, of which one would be redacted."""
        await self._fail_lookup(context)
        move = safety_pb2.SafetyMove(rule="pii.iban", then=safety_pb2.SAFETY_ACTION_REDACT, count=3)
        return safety_pb2.GetDryRunResponse(policy="next@1", texts=2, changed=1, moves=[move])

    async def _fail_lookup(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self.lookup_failures:
            await _abort(context, self.lookup_failures.pop(0))


async def _abort(context: grpc.aio.ServicerContext[Any, Any], step: Fail) -> None:
    if step.error is None:
        await context.abort(step.code, step.details)
    assert step.error is not None
    status = step.error.to_status()
    await context.abort(
        step.error.code,
        step.error.message,
        (("grpc-status-details-bin", status.SerializeToString()),),
    )


async def _hold(step: Hold) -> None:
    step.reached.set()
    try:
        await step.release.wait()
    except asyncio.CancelledError:
        step.cancelled.set()
        raise
