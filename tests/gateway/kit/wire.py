"""A gateway that serves, a client's stub, and the batcher that the test plays."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import grpc
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.admission.policies import Policies
from gateway.config.models import load_models
from gateway.config.policies import load_all, load_policies_of, load_router
from gateway.identity.resume_token import ResumeKey
from gateway.models.catalog import Catalog, ServedModel
from gateway.safety.inspector import Inspector
from gateway.safety.policy import SafetyPolicies
from gateway.server import Gateway
from gateway.shared.reload import GatewayReload
from gateway.validation.requests import fingerprint_of
from sluice.errors import SluiceError, from_status
from sluice.internal.v1.task_pb2 import Task
from sluice.settings import (
    CacheSettings,
    GatewaySettings,
    HttpSettings,
    IdentitySettings,
    JobsSettings,
    ModelSettings,
    NatsSettings,
    RecordsSettings,
    Settings,
)
from sluice.settings.routing import RoutingSettings
from sluice.telemetry.instruments import Instruments
from sluice.v1.inference_pb2 import GenerateRequest, GenerateResponse
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from sluice.v1.safety_pb2_grpc import SafetyServiceStub
from sluice.wire import tokens
from tests.gateway.kit.batcher import BOUND_S, WireBatcher, last, wire_batcher
from tests.support.events import EventStub
from tests.support.settings import tuned

MODELS: Final = ("small", "large")
RESUME_KEY: Final = "of all gateways of a test"


def settings_for(
    folder: Path,
    url: str | None = None,
    safety: dict[str, Any] | None = None,
    records: RecordsSettings | None = None,
    routing: dict[str, Any] | None = None,
    prices: Mapping[str, tuple[float, float]] | None = None,
    http: str | None = None,
    cache: CacheSettings | None = None,
    jobs: str = "127.0.0.1:0",
    more_models: Sequence[ModelSettings] = (),
    identity: IdentitySettings | None = None,
    tenants: dict[str, Any] | None = None,
    http_hosts: Sequence[str] = (),
    http_ping_s: float = 5.0,
    **gateway: Any,
) -> Settings:
    values = {"address": "127.0.0.1:0", "drain_s": 1.0, "resume_key": RESUME_KEY, **gateway}
    models = (_model(name, folder, *(prices or {}).get(name, (0, 0))) for name in MODELS)
    return Settings(
        models=(*models, *more_models),
        gateway=tuned(GatewaySettings, **values),
        http=tuned(HttpSettings, address=http, hosts=tuple(http_hosts), stream_ping_s=http_ping_s),
        identity=identity or IdentitySettings(),
        tenants=tenants or {},
        nats=NatsSettings(url=url),
        safety=safety or {},
        records=records or RecordsSettings(),
        cache=cache or CacheSettings(),
        jobs=JobsSettings(address=jobs),
        **({} if routing is None else {"routing": tuned(RoutingSettings, **routing)}),
    )


def _model(name: str, folder: Path, prompt_price: float, answer_price: float) -> ModelSettings:
    return ModelSettings(
        name=name, tier=name, path=str(folder), prompt_price=prompt_price, answer_price=answer_price
    )


def is_served(gateway: Gateway, model: str) -> bool:
    """Whether a worker that serves ``model`` (its task name) is alive, by the reports of batchers."""
    return gateway.transport.loads.load(model, time.monotonic()).ready


@dataclass
class Wire:
    """What a test talks to."""

    gateway: Gateway
    batcher: WireBatcher
    channel: grpc.aio.Channel
    catalog: Catalog
    spans: InMemorySpanExporter
    metrics: Instruments
    settings: Settings
    reload: GatewayReload

    @property
    def stub(self) -> Any:
        """Its calls of Generate give one event at a time, so that no test depends on what came in one message."""
        return EventStub(InferenceServiceStub(self.channel))

    @property
    def http(self) -> str:
        """Where HTTP is served."""
        assert self.gateway.http is not None, "opened with http"
        return self.gateway.http.address

    @property
    def safety(self) -> Any:
        return SafetyServiceStub(self.channel)

    def tokens(self, text: str) -> list[int]:
        tokenizer = self.catalog["small"].tokenizer.tokenizer
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    async def begin(
        self, request: GenerateRequest, model: str = "small", **options: Any
    ) -> tuple[Any, Task]:
        """Calls Generate, and returns the call and its task for ``model``."""
        call = self.stub.Generate(request, **options)
        return call, await self.batcher.task(model)

    async def end(self, call: Any, task: Task, text: str = "") -> list[GenerateResponse]:
        """Answers ``task`` with ``text``, and returns all that is left to read of the call."""
        await self.batcher.send(task, last(0, self.tokens(text)))
        return await events_of(call)

    async def ready(self, *models: str) -> None:
        """Reports ``models`` and waits until the gateway has heard of it."""
        await self.batcher.report(*models)
        await self.until(lambda: self._knows(models))

    def _knows(self, models: tuple[str, ...]) -> bool:
        return all(is_served(self.gateway, model) for model in models)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for something inside the gateway."""
        async with asyncio.timeout(BOUND_S):
            while not condition():  # noqa: ASYNC110, the gateway has no event for each fact
                await asyncio.sleep(0.005)

    def waits_for(self, task: Task) -> bool:
        """Whether the gateway waits for the row of ``task``."""
        return task.request_id in self.gateway.registry.dispatch

    def has_batcher(self, task: Task) -> bool:
        """Whether the gateway knows that a batcher has the row of ``task``."""
        runs = (run for result in self.gateway.registry for run in result.runs)
        return any(run.run_id == task.request_id and run.was_accepted for run in runs)

    async def forgotten(self, task: Task) -> None:
        """Waits until the gateway does not need the row any more."""
        await self.until(lambda: not self.waits_for(task))

    def span(self, name: str) -> Any:
        """The first ended span of that name, or None."""
        return next((s for s in self.spans.get_finished_spans() if s.name == name), None)

    async def health_becomes(self, service: str, status: int) -> None:
        """Watches until the health of ``service`` is ``status``."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        call = stub.Watch(health_pb2.HealthCheckRequest(service=service))
        async with asyncio.timeout(BOUND_S):
            while (await call.read()).status != status:
                pass
        call.cancel()

    async def health(self, service: str) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)


@cache
def _compiled(safety: str, *models: str) -> SafetyPolicies:
    """Compiled policies never change, so tests share them."""
    settings = Settings(safety=json.loads(safety) or {})
    if models:
        served = tuple(map(ModelSettings.model_validate_json, models))
        settings = settings.model_copy(update={"models": served})
    return load_policies_of(settings)


_loaded: Final[dict[str, ServedModel]] = {}
"""Tokenizers never change, so tests share them."""


@asynccontextmanager
async def open_wire(
    url: str,
    folder: Path,
    *,
    gateway_id: str = "gw1",
    safety: dict[str, Any] | None = None,
    more_models: Sequence[ModelSettings] = (),
    **options: Any,
) -> AsyncIterator[Wire]:
    """``options``: see `settings_for`."""
    settings = settings_for(folder, url, safety, more_models=more_models, **options)
    catalog = Catalog(load_models(settings, _loaded), settings.routing.default)
    _loaded.update((name, catalog[name]) for name in catalog.names)
    # Labels of guard models come with the models.
    labelled = [one.model_dump_json() for one in settings.models] if more_models else []
    inspector = Inspector(_compiled(json.dumps(safety), *labelled))
    router = load_router(settings, catalog.settings)
    metrics = Instruments()
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = provider.get_tracer("test"), metrics
    policies = Policies(settings, catalog, router, inspector)
    served = Gateway(settings, gateway_id, policies, *telemetry, load_all)
    async with (
        wire_batcher(url, gateway=gateway_id) as batcher,
        served.running(),
        grpc.aio.insecure_channel(served.address) as channel,
    ):
        wire = Wire(served, batcher, channel, catalog, exporter, metrics, settings, served.reload)
        await wire.ready(*MODELS, *(model.name for model in more_models))
        yield wire
    provider.shutdown()


Opened = Callable[..., AbstractAsyncContextManager[Wire]]
"""Opens a gateway with the options of `open_wire`."""


async def error_of(call: Any) -> tuple[grpc.StatusCode, SluiceError]:
    """The code and the typed error that ``call`` ends with."""
    try:
        await (events_of(call) if hasattr(call, "read") else call)
    except grpc.aio.AioRpcError as failure:
        return failure.code(), typed(failure)
    raise AssertionError("the call did not fail")


def typed(failure: grpc.aio.AioRpcError) -> SluiceError:
    details = dict(failure.trailing_metadata() or ()).get("grpc-status-details-bin")
    assert details is not None, f"an error without details: {failure}"
    status = status_pb2.Status.FromString(details)
    assert status.code == failure.code().value[0]
    error = from_status(status)
    assert error is not None
    return error


async def events_of(call: Any) -> list[GenerateResponse]:
    """All that is left to read, by `read` alone: grpc.aio allows one way of reading a call."""
    events = []
    async with asyncio.timeout(BOUND_S):
        while (event := await call.read()) is not grpc.aio.EOF:
            events.append(event)
    return events


def text_of(events: list[GenerateResponse]) -> str:
    return "".join(event.delta.text for event in events)


def tokens_of(events: list[GenerateResponse]) -> list[tokens.VisibleToken]:
    deltas = [event.delta for event in events]
    return [token for delta in deltas for token in tokens.tokens_of(delta, delta.index)]


def resumed(
    request: GenerateRequest, held: Sequence[tokens.VisibleToken], model: str = ""
) -> GenerateRequest:
    """A copy of ``request`` of a caller that was sent ``held`` of the answer of ``model``."""
    copy = GenerateRequest()
    copy.CopyFrom(request)
    tokens.put_tokens(copy.resume, held)
    copy.resume.model = model
    token = ResumeKey(RESUME_KEY).token(fingerprint_of(request), model or request.model, 0)
    copy.resume.resume_token = token.after(held)
    return copy


def prompt(text: str = "hello", **fields: Any) -> GenerateRequest:
    return GenerateRequest(prompt=text, model=fields.pop("model", "small"), **fields)
