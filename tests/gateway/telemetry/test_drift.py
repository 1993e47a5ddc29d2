"""What a gateway notices of its learned routers."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.routing.learned.artefact import save_to
from gateway.routing.learned.model import HeadKey
from gateway.telemetry.drift import DriftMonitor
from learning.train import train
from sluice.internal.v1.frame_pb2 import TASK_END_STOP
from sluice.settings.routing import DriftRules
from sluice.telemetry.instruments import Instruments
from sluice.v1 import admin_pb2
from sluice.v1.admin_pb2_grpc import AdminServiceStub
from sluice.wire.enums import word_of
from tests.gateway.kit.batcher import BOUND_S
from tests.gateway.kit.metrics import values
from tests.gateway.kit.wire import Wire, error_of, events_of, open_wire, prompt
from tests.gateway.upstream.test_escalation import saying
from tests.learning.made_up import EASY, outcomes

WINDOW = 50
SETTINGS = DriftRules(window=WINDOW, min_predictions=20, min_outcomes=10)
PROMPT, CASCADE = "prompt", "cascade"
PROMPT_HEAD = HeadKey("routing", "r1", admin_pb2.ROUTER_HEAD_PROMPT)
CASCADE_HEAD = HeadKey("routing", "r1", admin_pb2.ROUTER_HEAD_CASCADE)
USUAL = [row.prompt for row in outcomes(WINDOW, seed=2)]


class Heard:
    """A `DriftMonitor` and its metrics."""

    def __init__(self) -> None:
        self.instruments = Instruments()
        self.drift = DriftMonitor("gw1", self.instruments)

    def score(self, by: HeadKey, gain: float, count: int = 1) -> None:
        for _ in range(count):
            self.drift.scored(admin_pb2.RouterScore(**by._asdict(), gain=gain))


def held_out(*heads: HeadKey) -> dict[HeadKey, Any]:
    draw = np.random.default_rng(0)
    return {head: draw.normal(0, 0.1, 300).astype(np.float32) for head in heads}


def record(
    *heads: str, strategy: str = "learned", model: str = "small", error: str = ""
) -> admin_pb2.RequestRecord:
    scores = [
        admin_pb2.RouterScore(
            policy="routing",
            version="r1",
            head=f"ROUTER_HEAD_{head.upper()}",
            chances={"small": 0.5, "large": 0.75},
        )
        for head in heads
    ]
    route = admin_pb2.RouteRecord(strategy=f"ROUTE_STRATEGY_{strategy.upper()}", scores=scores)
    return admin_pb2.RequestRecord(
        request_id="req-1",
        route=route,
        attempts=[admin_pb2.ModelAttempt(model=model)],
        error_reason=error,
    )


def outcome_rows(drift: DriftMonitor) -> dict[str, int]:
    return {
        word_of(admin_pb2.RouterHead, router.head): router.accuracy.rows
        for router in drift.health().routers
    }


def drifted(instruments: Instruments) -> dict[str, float]:
    """By signal."""
    found = values(instruments, "sluice.router.drifted")
    return {dict(labels)["sluice.drift.signal"]: value for labels, value in found.items()}


def test_a_shift_is_a_metric_until_it_is_over_or_its_router_goes() -> None:
    heard = Heard()
    heard.drift.use(held_out(PROMPT_HEAD), SETTINGS)
    assert values(heard.instruments, "sluice.router.input_drift") == {}, "gathering"
    heard.score(PROMPT_HEAD, 0.9, count=40)
    assert len(values(heard.instruments, "sluice.router.input_drift")) == 1
    assert values(heard.instruments, "sluice.router.accuracy_bias") == {}, "no outcomes, no bias"
    assert drifted(heard.instruments) == {"inputs": 1, "accuracy": 0}
    for gain in held_out(PROMPT_HEAD)[PROMPT_HEAD][:WINDOW].tolist():
        heard.score(PROMPT_HEAD, gain)
    assert drifted(heard.instruments) == {"inputs": 0, "accuracy": 0}
    heard.drift.use(held_out(), SETTINGS)
    assert drifted(heard.instruments) == {}


def test_reload_keeps_windows_of_unchanged_heads() -> None:
    heard = Heard()
    heard.drift.use(held_out(PROMPT_HEAD), SETTINGS)
    heard.score(PROMPT_HEAD, 0.0, count=7)
    rows = [router.inputs.rows for router in heard.drift.health().routers]
    heard.drift.use(held_out(PROMPT_HEAD), SETTINGS)
    assert [router.inputs.rows for router in heard.drift.health().routers] == rows == [7]
    newer = HeadKey("routing", "r2", admin_pb2.ROUTER_HEAD_PROMPT)
    for heads, settings in (
        (held_out(newer), SETTINGS),
        (held_out(newer), DriftRules()),
        ({newer: np.zeros(300, np.float32)}, DriftRules()),
    ):
        heard.drift.use(heads, settings)
        assert [router.inputs.rows for router in heard.drift.health().routers] == [0]
        heard.score(newer, 0.0, count=3)
    heard.drift.graded(record(PROMPT), 1.0)
    assert outcome_rows(heard.drift) == {PROMPT: 0}
    heard.score(PROMPT_HEAD, 0.0)


@pytest.mark.parametrize(
    ("graded", "counts_for"),
    [
        (record(PROMPT), {PROMPT}),
        (record(PROMPT, CASCADE, strategy="cascade"), {CASCADE}),
        (record(PROMPT, strategy="cascade"), set()),
        (record(PROMPT, model="another"), set()),
        (record(PROMPT, error="ENGINE_FAILED"), set()),
        (record(), set()),
        (admin_pb2.RequestRecord(route=admin_pb2.RouteRecord()), set()),
    ],
)
def test_a_grade_counts_for_the_head_that_was_asked_last(
    graded: admin_pb2.RequestRecord, counts_for: set[str]
) -> None:
    heard = Heard()
    heard.drift.use(held_out(PROMPT_HEAD, CASCADE_HEAD), SETTINGS)
    for grade in (0.0, 1.0):
        heard.drift.graded(graded, grade)
    assert outcome_rows(heard.drift) == {
        head: int(head in counts_for) for head in (PROMPT, CASCADE)
    }
    for router in heard.drift.health().routers:
        assert router.accuracy.HasField("bias") is (
            word_of(admin_pb2.RouterHead, router.head) in counts_for
        )
        if word_of(admin_pb2.RouterHead, router.head) in counts_for:
            assert router.accuracy.bias == 0.5


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With both heads; what is hard shows in the answer."""
    return _artefact(tmp_path_factory, answers=True)


@pytest.fixture(scope="module")
def by_prompt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is hard shows in the prompt."""
    return _artefact(tmp_path_factory, answers=False)


def _artefact(folders: pytest.TempPathFactory, *, answers: bool) -> Path:
    path = folders.mktemp("router") / "made_up.router"
    save_to(train(outcomes(150, answers=answers), seed=1), path)
    return path


def learned(path: Path, strong_share: float, **more: Any) -> dict[str, Any]:
    return {
        "learned": {
            "artefact": str(path),
            "weak": "small",
            "strong": "large",
            "target": {"strong_share": strong_share},
        },
        "drift": SETTINGS,
        **more,
    }


async def answered(wire: Wire, texts: Iterable[str], model: str) -> list[str]:
    """The request ids of requests that ``model`` answered."""
    request_ids = []
    for text in texts:
        call, task = await wire.begin(prompt(text, model=""), model)
        await wire.end(call, task, "hello")
        request_ids.append(task.request_id)
    return request_ids


async def health(wire: Wire) -> admin_pb2.GetRouterHealthResponse:
    stub: Any = AdminServiceStub(wire.channel)
    response: admin_pb2.GetRouterHealthResponse = await stub.GetRouterHealth(
        admin_pb2.GetRouterHealthRequest()
    )
    return response


async def grade(wire: Wire, request_id: str, value: float) -> None:
    """Tries until the record has been written."""
    stub: Any = AdminServiceStub(wire.channel)
    async with asyncio.timeout(BOUND_S):
        while True:
            call = stub.SubmitFeedback(
                admin_pb2.SubmitFeedbackRequest(request_id=request_id, grade=value)
            )
            try:
                await call
            except Exception:
                assert (await error_of(call))[1].reason == "RECORD_UNKNOWN"
                await asyncio.sleep(0.01)
            else:
                return


async def test_prompts_of_another_kind_are_told_to_operators(
    nats_url: str, model_folder: Path, by_prompt: Path
) -> None:
    async with open_wire(nats_url, model_folder, routing=learned(by_prompt, 1.0)) as wire:
        await answered(wire, USUAL, "large")
        (router,) = (await health(wire)).routers
        assert (router.inputs.state, router.inputs.rows) == (admin_pb2.DRIFT_STATE_STABLE, WINDOW)
        assert router.accuracy.state == admin_pb2.DRIFT_STATE_GATHERING
        await answered(wire, [f"{EASY} {i}" for i in range(WINDOW)], "large")
        (router,) = (await health(wire)).routers
        assert router.inputs.state == admin_pb2.DRIFT_STATE_DRIFTED
        assert router.inputs.stability_index > router.inputs.limit
        (seen,) = values(wire.metrics, "sluice.router.input_drift").values()
        assert seen == router.inputs.stability_index
        await answered(wire, USUAL, "large")
        (router,) = (await health(wire)).routers
        assert router.inputs.state == admin_pb2.DRIFT_STATE_STABLE


async def test_a_judged_answer_counts_for_the_cascade_head(
    nats_url: str, model_folder: Path, artefact: Path
) -> None:
    cascade = {
        "first": "small",
        "second": "large",
        "commit_tokens": 200,
        "artefact": str(artefact),
        "target": {"strong_share": 0.01},
    }
    routing = learned(artefact, 0.01, cascade=cascade)
    async with open_wire(nats_url, model_folder, routing=routing) as wire:
        call, task = await wire.begin(prompt("How many are 5 and 7 by the garden?", model=""))
        answer = "There are 5 + 7 = 12 in all.\n#### 12"
        await wire.batcher.send(task, saying(wire, answer, -0.01, end=TASK_END_STOP))
        await events_of(call)
        await grade(wire, task.request_id, 1.0)
        stub: Any = AdminServiceStub(wire.channel)
        explained = await stub.GetRequestRecord(
            admin_pb2.GetRequestRecordRequest(request_id=task.request_id)
        )
        by_head = {
            word_of(admin_pb2.RouterHead, router.head): router
            for router in (await health(wire)).routers
        }
    scores = explained.record.route.scores
    assert [word_of(admin_pb2.RouterHead, score.head) for score in scores] == [PROMPT, CASCADE]
    assert {router.inputs.rows for router in by_head.values()} == {1}
    assert by_head[PROMPT].accuracy.rows == 0
    assert by_head[CASCADE].accuracy.rows == 1
    assert by_head[CASCADE].accuracy.bias == pytest.approx(1 - scores[1].chances["small"])
