"""Two gateway processes, one of which is killed in the middle of answers; the test plays the batcher."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.config.models import load_catalog
from sluice.client import AnswerBuilder, AsyncClient, Delta
from sluice.startup import free_port
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from tests.gateway.kit.batcher import WireBatcher, frame, last, wire_batcher
from tests.gateway.kit.wire import MODELS, prompt, settings_for

BOUND_S = 60.0
TEXT = "hello world, how are you?"


@contextmanager
def gateway_process(
    folder: Path, model_folder: Path, url: str, name: str, address: str
) -> Iterator["subprocess.Popen[bytes]"]:
    path = folder / f"{name}.yaml"
    settings = settings_for(model_folder, url, address=address)
    path.write_text(settings.to_yaml(), encoding="utf-8")
    command = [sys.executable, "-m", "gateway", "--config", str(path), "--id", name]
    root = Path(__file__).parents[3]
    with subprocess.Popen(command, cwd=root, env=os.environ, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


async def report(batcher: WireBatcher) -> None:
    """Gateways forget a batcher that is silent."""
    while True:
        await batcher.report(*MODELS)
        await asyncio.sleep(0.25)


async def serving(channel: grpc.aio.Channel) -> None:
    """Returns when the gateway there has heard of a worker."""
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service="model.small")
    await stub.Check(request, wait_for_ready=True, timeout=BOUND_S)
    call = stub.Watch(request, timeout=BOUND_S)
    while (await call.read()).status != health_pb2.HealthCheckResponse.SERVING:
        pass
    call.cancel()


@pytest.mark.long
@pytest.mark.parametrize("key", ["named", ""])
async def test_the_other_gateway_goes_on_at_the_same_token(
    nats_url: str, tmp_path: Path, model_folder: Path, key: str
) -> None:
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("gw1", "gw2")}
    tokenizer = load_catalog(settings_for(model_folder))["small"].tokenizer.tokenizer
    answer = list(tokenizer.encode(TEXT, add_special_tokens=False).ids)
    with (
        gateway_process(tmp_path, model_folder, nats_url, "gw1", addresses["gw1"]) as one,
        gateway_process(tmp_path, model_folder, nats_url, "gw2", addresses["gw2"]) as two,
    ):
        processes = {"gw1": one, "gw2": two}
        async with (
            asyncio.timeout(2 * BOUND_S),
            wire_batcher(nats_url) as batcher,
            AsyncClient(",".join(addresses.values())) as client,
            grpc.aio.insecure_channel(addresses["gw1"]) as first,
            grpc.aio.insecure_channel(addresses["gw2"]) as second,
        ):
            reporting = asyncio.ensure_future(report(batcher))
            await asyncio.gather(serving(first), serving(second))
            builder, begun = AnswerBuilder(), asyncio.Event()

            async def ask() -> str:
                stream = client.generate("hello", model="small", idempotency_key=key)
                async with stream:
                    async for event in stream:
                        builder.add(event)
                        if isinstance(event, Delta):
                            begun.set()
                return builder.build().text

            asked = asyncio.ensure_future(ask())
            task = await batcher.task()
            await batcher.send(task, frame(0, answer[:3]))
            await begun.wait()
            stub: Any = InferenceServiceStub(first if task.gateway == "gw1" else second)
            other = stub.Generate(prompt())
            await batcher.task()
            assert (await other.read()).HasField("started")
            processes[task.gateway].send_signal(signal.SIGKILL)
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await other.read()
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
            again = await batcher.task()
            assert again.gateway != task.gateway
            assert list(again.produced_token_ids) == answer[:3]
            assert again.sampling.seed == task.sampling.seed
            await batcher.send(again, last(3, answer[3:]))
            assert await asked == TEXT
            reporting.cancel()
