"""Models are added, replaced and removed at a running gateway; the test plays the batcher."""

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

from gateway.shared.reload import ReloadTimes
from sluice.settings import ModelSettings, Settings, SettingsError
from sluice.settings.routing import RoutingSettings
from sluice.v1.inference_pb2 import GenerateRequest
from tests.gateway.kit.batcher import last
from tests.gateway.kit.wire import Wire, error_of, events_of, is_served, resumed, text_of, tokens_of

NOT_SERVING, SERVING = HealthCheckResponse.NOT_SERVING, HealthCheckResponse.SERVING


def with_models(wire: Wire, *models: ModelSettings) -> Settings:
    default = RoutingSettings(default=models[0].name)
    return wire.settings.model_copy(update={"models": models, "routing": default})


async def test_replaced_model_serves_new_requests_only(wire: Wire) -> None:
    wire.gateway.in_force.prepare_s = 0.0
    wire.reload.times = ReloadTimes(ready_s=0.1)
    small, large = wire.settings.models
    after = with_models(wire, small.model_copy(update={"generation": 1}), large)
    running = wire.stub.Generate(GenerateRequest(prompt="one", model="small"))
    task = await wire.batcher.task("small")
    with pytest.raises(SettingsError, match="no batcher has a worker of small--1"):
        await wire.reload(after)
    await wire.ready("small", "small--1", "large")
    await wire.reload(after)
    later = wire.stub.Generate(GenerateRequest(prompt="two", model="small"))
    new = await wire.batcher.task("small--1")
    assert await wire.health("tasks.small") == SERVING
    await wire.batcher.send(task, last(0, wire.tokens("first")))
    assert text_of(await events_of(running)) == "first"
    await wire.health_becomes("tasks.small", NOT_SERVING)
    await wire.batcher.send(new, last(0, wire.tokens("second")))
    events = await events_of(later)
    assert text_of(events) == "second"
    assert events[0].started.model == "small"
    assert await wire.health("model.small") == await wire.health("tasks.small--1") == SERVING


async def test_tokens_of_a_replaced_version_are_continued_by_it_alone(wire: Wire) -> None:
    wire.gateway.in_force.prepare_s = 0.0
    small, large = wire.settings.models
    request = GenerateRequest(prompt="one", model="small")
    running = wire.stub.Generate(request)
    ids = wire.tokens("first")
    await wire.batcher.send(await wire.batcher.task("small"), last(0, ids))
    events = await events_of(running)
    again = resumed(request, tokens_of(events), "small")
    again.resume.resume_token = events[-2].delta.resume_token
    await wire.ready("small", "small--1", "large")
    await wire.reload(with_models(wire, small.model_copy(update={"generation": 1}), large))
    await wire.health_becomes("tasks.small", NOT_SERVING)
    call = wire.stub.Generate(again)
    task = await wire.batcher.task("small")
    assert list(task.produced_token_ids) == ids
    await wire.health_becomes("tasks.small", SERVING)
    await wire.batcher.send(task, last(len(ids)))
    assert text_of(await events_of(call)) == ""
    # Without a worker of that version there is nobody who could go on.
    await wire.batcher.report("small--1", "large")
    await wire.until(lambda: not is_served(wire.gateway, "small"))
    code, error = await error_of(wire.stub.Generate(again))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "is of a version of the model that was replaced" in str(error)


async def test_tokens_of_a_new_version_are_continued_by_it(wire: Wire) -> None:
    wire.gateway.in_force.prepare_s = 0.0
    small, large = wire.settings.models
    await wire.ready("small", "small--1", "large")
    await wire.reload(with_models(wire, small.model_copy(update={"generation": 1}), large))
    request = GenerateRequest(prompt="one", model="small")
    running = wire.stub.Generate(request)
    ids = wire.tokens("first")
    await wire.batcher.send(await wire.batcher.task("small--1"), last(0, ids))
    events = await events_of(running)
    again = resumed(request, tokens_of(events), "small")
    again.resume.resume_token = events[-2].delta.resume_token
    call = wire.stub.Generate(again)
    task = await wire.batcher.task("small--1")
    assert list(task.produced_token_ids) == ids
    await wire.batcher.send(task, last(len(ids)))
    assert text_of(await events_of(call)) == ""


async def test_a_removed_model_is_unknown_and_an_added_one_is_known(wire: Wire) -> None:
    small, _ = wire.settings.models
    await wire.ready("small", "large", "other")
    other = small.model_copy(update={"name": "other"})
    await wire.reload(with_models(wire, small, other))
    await wire.health_becomes("model.large", NOT_SERVING)
    code, error = await error_of(wire.stub.Generate(GenerateRequest(prompt="x", model="large")))
    assert code is grpc.StatusCode.NOT_FOUND
    assert "there are small, other" in str(error)
    call = wire.stub.Generate(GenerateRequest(prompt="x", model="other"))
    await wire.batcher.send(await wire.batcher.task("other"), last(0, wire.tokens("yes")))
    assert text_of(await events_of(call)) == "yes"
