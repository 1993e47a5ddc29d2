"""What a gateway counts of requests; before a real nats-server."""

from time import monotonic

import grpc
import pytest

from gateway.telemetry.metrics import PREDICTED_WAIT_MS
from sluice.internal.v1.control_pb2 import ClassReport
from sluice.internal.v1.frame_pb2 import TASK_END_LENGTH
from sluice.telemetry import names
from sluice.v1 import inference_pb2 as pb
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.metrics import values
from tests.gateway.kit.wire import Wire, error_of, events_of, is_served, prompt


def requests(wire: Wire) -> dict[tuple[object, ...], float]:
    """By model, class and outcome."""
    keys = names.GEN_AI_RESPONSE_MODEL, names.PRIORITY_CLASS, "sluice.outcome"
    return {
        tuple(dict(labels).get(key) for key in keys): value
        for labels, value in values(wire.metrics, "sluice.requests").items()
    }


async def test_answers_count_tokens_and_first_token(wire: Wire) -> None:
    for end in (TASK_END_LENGTH, None):
        call, task = await wire.begin(prompt("hello world"))
        tokens = wire.tokens("hello world")
        whole = last(0, tokens) if end is None else frame(0, tokens, end=end)
        await wire.batcher.send(task, whole)
        await events_of(call)
    assert requests(wire) == {
        ("small", "interactive", "length"): 1,
        ("small", "interactive", "stop"): 1,
    }
    counted = values(wire.metrics, "sluice.tokens")
    by_type = {dict(labels)["gen_ai.token.type"]: value for labels, value in counted.items()}
    assert by_type == {"input": 2 * len(task.prompt_token_ids), "output": 2 * len(tokens)}
    ((labels, count),) = values(wire.metrics, "gen_ai.server.time_to_first_token").items()
    assert count == 2
    assert dict(labels) == {
        names.GEN_AI_OPERATION: "chat",
        names.GEN_AI_SYSTEM: "sluice",
        names.GEN_AI_RESPONSE_MODEL: "small",
        names.PRIORITY_CLASS: "interactive",
    }


async def test_predictions_are_judged_of_answers_that_waited(wire: Wire) -> None:
    speed = ClassReport(priority_class="interactive", free_rows=8, first_token_ms=100, token_ms=10)
    await wire.batcher.report("small", "large", classes=[speed])
    loads = wire.gateway.transport.loads
    await wire.until(lambda: loads.load("small", monotonic()).classes["interactive"].token_s > 0)

    async def answer(max_tokens: int, waited_ms: float) -> None:
        call, task = await wire.begin(prompt(sampling=pb.SamplingParams(max_tokens=max_tokens)))
        whole = frame(0, wire.tokens("x")[:1], end=TASK_END_LENGTH)
        whole.final.timings.queue_ms = waited_ms
        await wire.batcher.send(task, whole)
        await events_of(call)

    for max_tokens, waited_ms in ((1, PREDICTED_WAIT_MS - 1), (9, PREDICTED_WAIT_MS)):
        await answer(max_tokens, waited_ms)
    assert not values(wire.metrics, "sluice.prediction.error"), "or its length is not known"
    await answer(1, PREDICTED_WAIT_MS)
    ((labels, count),) = values(wire.metrics, "sluice.prediction.error").items()
    assert (dict(labels)[names.GEN_AI_RESPONSE_MODEL], count) == ("small", 1)


async def test_what_fails_is_counted_by_its_reason(wire: Wire) -> None:
    _, error = await error_of(wire.stub.Generate(prompt("hello " * 500)))
    call = wire.stub.Generate(prompt())
    await wire.batcher.task()
    call.cancel()
    await wire.until(lambda: len(requests(wire)) == 2)
    assert requests(wire) == {
        ("small", "interactive", error.reason): 1,
        ("small", "interactive", "CANCELLED"): 1,
    }
    assert error.reason == "PROMPT_TOO_LONG"


async def test_refused_requests_count_for_the_named_model(wire: Wire) -> None:
    await wire.batcher.report(leaving=True)
    await wire.until(lambda: not is_served(wire.gateway, "small"))
    for model in ("small", ""):
        await error_of(wire.stub.Generate(prompt(model=model)))
    await wire.until(lambda: len(requests(wire)) == 2)
    assert requests(wire) == {
        ("small", "interactive", "MODEL_UNAVAILABLE"): 1,
        (None, "interactive", "MODEL_UNAVAILABLE"): 1,
    }


async def test_rows_that_wait_for_room_are_shown_by_model_and_class(wire: Wire) -> None:
    room = ClassReport(priority_class="bulk", room_rows=1, room_bytes=10_000)
    await wire.batcher.report("small", classes=[room])
    calls = [wire.stub.Generate(prompt(priority=pb.PRIORITY_BULK)) for _ in range(3)]
    await wire.until(lambda: list(values(wire.metrics, "sluice.room.waiting").values()) == [2])
    ((labels, _),) = values(wire.metrics, "sluice.room.waiting").items()
    assert dict(labels) == {names.GEN_AI_RESPONSE_MODEL: "small", names.PRIORITY_CLASS: "bulk"}
    for _ in calls:
        await wire.batcher.send(await wire.batcher.task(priority_class="bulk"), last(0))
    for call in calls:
        await events_of(call)
    assert not any(values(wire.metrics, "sluice.room.waiting").values())


async def test_refused_calls_are_counted_by_reason(wire: Wire) -> None:
    await error_of(wire.stub.Generate(prompt(model="nope")))
    await error_of(wire.stub.Generate(prompt(model="nope")))
    await error_of(wire.stub.Generate(prompt(sampling=pb.SamplingParams(temperature=-1))))
    call = wire.stub.Generate(prompt("hello"))
    await wire.batcher.send(await wire.batcher.task(), last(0, wire.tokens("hello")))
    await events_of(call)
    late = wire.stub.Generate(prompt("hello"), timeout=0.5)
    await wire.batcher.task()
    with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
        await events_of(late)
    assert values(wire.metrics, "sluice.requests.refused") == {
        frozenset({(names.ERROR_REASON, "MODEL_UNKNOWN")}): 2,
        frozenset({(names.ERROR_REASON, "REQUEST_INVALID")}): 1,
    }
