"""Streams through the whole mesh, many at once and through the death of processes: the text is that of a calm run."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
import pytest_asyncio

from model_workers.tiers.tasks import heldout
from sluice import settings as config
from sluice.settings import resolve_model_path
from sluice.settings.routing import RoutingSettings
from sluice.v1 import inference_pb2 as pb
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from sluice.wire.clock import ms_of
from supervisor.health import wait_until_serving
from supervisor.mesh import Mesh, running_mesh
from tests.support.mesh import RunningMesh, kill, stubs_of

if TYPE_CHECKING:
    from sluice.v1.inference_pb2_grpc import InferenceServiceAsyncStub

pytestmark = pytest.mark.mesh

TIMEOUT_S = 90.0
LONG_TOKENS = 500
BLOWS = 4
"""On a busy machine an answer may be whole before its reader hears of its first tokens."""
GREEDY = pb.SamplingParams(max_tokens=LONG_TOKENS)
SAMPLED = pb.SamplingParams(temperature=1.0, seed=7, max_tokens=LONG_TOKENS)


@dataclass
class Received:
    """What a client saw of one answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    reason: int = 0
    recovered: bool = False


@dataclass
class Progress:
    """Lets a test wait until so many streams have begun: before that, a request may not have reached NATS yet."""

    wanted: int
    begun: list[Received] = field(default_factory=list)
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, received: Received) -> None:
        self.begun.append(received)
        if len(self.begun) >= self.wanted:
            self.reached.set()

    @property
    def tokens(self) -> int:
        """Of all streams, so far."""
        return sum(len(received.token_ids) for received in self.begun)


async def ask(
    stub: "InferenceServiceAsyncStub", request: pb.GenerateRequest, progress: Progress | None = None
) -> Received:
    """Reads one answer to its end; the indexes of its tokens must follow one another."""
    received = Received()
    async for event in stub.Generate(request, timeout=TIMEOUT_S):
        if event.HasField("delta"):
            assert event.delta.index == len(received.token_ids)
            if progress is not None and not received.token_ids:
                progress.begin(received)
            received.text += event.delta.text
            received.token_ids += event.delta.token_ids
        received.recovered |= any(one.kind == pb.NOTICE_KIND_RECOVERED for one in event.notices)
        received.reason = received.reason or event.finished.reason
    assert received.reason, "the stream ended without Finished"
    return received


async def one_by_one(
    stub: "InferenceServiceAsyncStub", requests: list[pb.GenerateRequest]
) -> list[str]:
    """The texts of undisturbed answers: nothing else runs."""
    return [(await ask(stub, request)).text for request in requests]


def desk_requests(count: int, model: str) -> list[pb.GenerateRequest]:
    """Different questions of every kind."""
    examples = heldout(n_per_cell=-(-count // 7), seed=11)[:count]
    assert len(examples) == count
    return [
        pb.GenerateRequest(
            prompt=example.prompt,
            model=model,
            sampling=pb.SamplingParams(max_tokens=example.max_tokens),
        )
        for example in examples
    ]


@pytest.mark.parametrize("streams", [8, pytest.param(64, marks=pytest.mark.long)])
async def test_concurrent_streams_say_what_each_says_alone(mesh: RunningMesh, streams: int) -> None:
    requests = desk_requests(streams, "small")
    async with grpc.aio.insecure_channel(mesh.address) as channel:
        stub = InferenceServiceStub(channel)
        alone = await one_by_one(stub, requests)
        together = await asyncio.gather(*(ask(stub, request) for request in requests))
    assert [received.text for received in together] == alone


@pytest.mark.parametrize("tokens", [1, 48])
async def test_every_millisecond_of_an_answer_is_named(mesh: RunningMesh, tokens: int) -> None:
    sampling = pb.SamplingParams(min_tokens=tokens, max_tokens=tokens)
    request = pb.GenerateRequest(prompt="order 7 is late", model="small", sampling=sampling)
    async with grpc.aio.insecure_channel(mesh.address) as channel:
        stream = InferenceServiceStub(channel).Generate(request, timeout=TIMEOUT_S)
        timings = [event.finished.timings async for event in stream][-1]
    ms = {field.name: ms_of(value) for field, value in timings.ListFields()}
    total, _ = ms.pop("total"), ms.pop("time_to_first_token")
    assert sum(ms.values()) == pytest.approx(total, abs=0.01), ms
    assert all(ms[name] > 0 for name in ("admission", "queue", "batch", "prefill", "delivery"))
    assert (ms["decode"] > 0) == (tokens > 1)


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The large tier with another end token, so that answers are long enough to be struck in mid-stream."""
    folder = tmp_path_factory.mktemp("models") / "endless"
    shutil.copytree(resolve_model_path("builtin:large"), folder)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**values, "eos_token_id": values["pad_token_id"]}))
    # The tokenizer names an end token too, and each of them ends an answer.
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": "<|pad|>"}))
    return folder


@pytest.fixture(scope="module")
def resilient_settings(endless_model: Path) -> config.Settings:
    """Short stall limits: what is lost is found soon."""
    return config.Settings(
        models=(
            config.ModelSettings(name="large", tier="large", path=str(endless_model), slots=8),
        ),
        routing=RoutingSettings(default="large"),
        gateway=config.GatewaySettings(address="127.0.0.1:0", drain_s=1.0),
        batcher=config.BatcherSettings(drain_s=1.0),
    )


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def struck_mesh(resilient_settings: config.Settings) -> AsyncIterator[Mesh]:
    """A mesh that takes one blow after the other."""
    async with running_mesh(resilient_settings) as mesh:
        yield mesh


def long_requests() -> list[pb.GenerateRequest]:
    """Different questions, greedy and sampled in turn, most of them answered to the last token."""
    return [
        pb.GenerateRequest(prompt=example.prompt, model="large", sampling=sampling)
        for example, sampling in zip(heldout(n_per_cell=1, seed=3), cycle((GREEDY, SAMPLED)))
    ]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("triton-large", marks=pytest.mark.long),
        pytest.param("stub", marks=pytest.mark.long),
        pytest.param("batcher", marks=pytest.mark.long),
        pytest.param("nats", marks=pytest.mark.long),
    ],
)
async def test_a_process_killed_in_mid_stream_changes_no_text(
    struck_mesh: Mesh, victim: str
) -> None:
    requests = long_requests()
    models = [model.name for model in struck_mesh.settings.models]
    await wait_until_serving(struck_mesh.address, models, TIMEOUT_S)
    async with grpc.aio.insecure_channel(struck_mesh.address) as channel:
        stub = InferenceServiceStub(channel)
        undisturbed = await asyncio.gather(*(ask(stub, request) for request in requests))
        for _ in range(BLOWS):
            await wait_until_serving(struck_mesh.address, models, TIMEOUT_S)
            struck, tokens_before = await ask_and_strike(stub, requests, struck_mesh, victim)
            assert [received.text for received in struck] == [r.text for r in undisturbed]
            # Half of the tokens are more than any queue on the way holds: they were made after the blow.
            in_midst = tokens_before < sum(len(received.token_ids) for received in struck) / 2
            recovered = any(received.recovered for received in struck)
            if in_midst and (recovered or victim not in ("triton-large", "stub")):
                return
    pytest.fail("every blow came too late to matter")


async def ask_and_strike(
    stub: "InferenceServiceAsyncStub", requests: list[pb.GenerateRequest], mesh: Mesh, victim: str
) -> tuple[list[Received], int]:
    """The answers, with a blow to ``victim`` soon after they have begun, and how many tokens had come by then."""
    progress = Progress(wanted=len(requests))
    streams = asyncio.gather(*(ask(stub, request, progress) for request in requests))
    async with asyncio.timeout(TIMEOUT_S):
        await progress.reached.wait()
        tokens_before = progress.tokens
        strike(mesh, victim)
        return await streams, tokens_before


def strike(mesh: Mesh, victim: str) -> None:
    """SIGKILL to a process of the mesh, or to the Python process of the model inside Triton."""
    if victim == "stub":
        os.kill(stubs_of(mesh)["large"], signal.SIGKILL)
    else:
        kill(mesh, victim)
