"""Guard models on a call's way: their rows, what waits for them, what a caller sees; before a real nats-server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from sluice.internal.v1.control_pb2 import ClassReport
from sluice.internal.v1.frame_pb2 import TASK_END_FAILED, TASK_END_LENGTH, Logprobs, TaskError
from sluice.internal.v1.task_pb2 import Task
from sluice.telemetry import names
from sluice.v1 import inference_pb2 as pb
from sluice.v1 import safety_pb2
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.cascades import audited, explained
from tests.gateway.kit.wire import (
    Wire,
    error_of,
    events_of,
    is_served,
    open_wire,
    prompt,
    resumed,
    text_of,
)

ANSWER = "hello world, how are you today?"
UNSAFE = "unsafe\nS1"


def guarded(**keys: Any) -> dict[str, Any]:
    guard = {"model": "large", "template": "llama_guard", "budget_s": 30, **keys}
    return {"policies": {"default": {"guard": {"harm": guard}}}}


@pytest.fixture
def opened(nats_url: str, model_folder: Path) -> Any:
    """Opens a gateway with one guard of the prompt, unless it is told otherwise."""

    @asynccontextmanager
    async def open_with(more: dict[str, Any] | None = None, **keys: Any) -> AsyncIterator[Wire]:
        async with open_wire(nats_url, model_folder, safety=guarded(**keys), **more or {}) as wire:
            yield wire

    return open_with


async def judge(wire: Wire, check: Task, verdict: str) -> None:
    """Answers a guard's row, and waits until the gateway has it."""
    await wire.batcher.send(check, last(0, wire.tokens(verdict)))
    await wire.forgotten(check)


def asked(wire: Wire, check: Task) -> str:
    tokenizer = wire.catalog["large"].tokenizer.tokenizer
    return tokenizer.decode(list(check.prompt_token_ids))


async def test_check_runs_beside_the_run_and_holds_the_answer(opened: Any) -> None:
    async with opened() as wire:
        call = wire.stub.Generate(prompt("what is it", priority=pb.PRIORITY_STANDARD))
        task = await wire.batcher.task("small", "standard")
        check = await wire.batcher.task("large", "standard")
        assert check.request_id == f"{task.request_id}-g1"
        assert "what is it" in asked(wire, check)
        assert check.timeout_ms <= task.timeout_ms
        # The whole answer is here before the verdict is.
        await wire.batcher.send(task, last(0, wire.tokens(ANSWER)))
        await wire.forgotten(task)
        assert not wire.waits_for(task)
        await judge(wire, check, UNSAFE)
        assert (await call.read()).HasField("started")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call.read()
        assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert len(wire.gateway.registry) == 0


async def test_an_objection_stops_the_run_and_names_the_rule(opened: Any) -> None:
    async with opened() as wire:
        call, task = await wire.begin(prompt("a dreadful plan"))
        await wire.batcher.send(task, frame(0, wire.tokens(ANSWER)))
        await judge(wire, await wire.batcher.task("large"), "unsafe\nS1,S9")
        code, error = await error_of(call)
        assert (code.name, error.reason) == ("FAILED_PRECONDITION", "SAFETY_BLOCKED")
        assert error.metadata["rules"] == "guard.harm.S1,guard.harm.S9"
        assert error.metadata["policy"].startswith("default@")
        assert "dreadful" not in error.message
        await wire.batcher.cancelled(task)


async def test_safe_verdict_shows_held_text_and_streaming_continues(opened: Any) -> None:
    async with opened() as wire:
        call, task = await wire.begin(prompt())
        await wire.batcher.send(task, frame(0, wire.tokens(ANSWER)))
        message = await wire.batcher.message("large")
        await judge(wire, Task.FromString(message.data), "\n\nsafe")
        assert (await call.read()).HasField("started")
        assert (await call.read()).delta.text == ANSWER
        count = len(wire.tokens(ANSWER))
        await wire.batcher.send(task, last(count, wire.tokens(" fine")))
        events = await events_of(call)
        assert text_of(events) == " fine"
        assert events[-1].finished.reason == pb.FINISH_REASON_STOP
        span = wire.span(names.SPAN_GUARD)
        assert span.attributes[names.GEN_AI_OPERATION] == "apply_guardrail"
        assert span.attributes[names.GUARDRAIL_NAME] == "harm"
        assert span.attributes[names.GUARDRAIL_TARGET] == "input"
        assert span.attributes[names.GUARDRAIL_OUTCOMES] == ("guard.harm.pass:allow",)
        assert f"{span.context.span_id:016x}" in message.headers["traceparent"]
        assert span.parent.span_id == wire.span(names.SPAN_GENERATE).context.span_id


@pytest.mark.parametrize("fail", ["open", "closed"])
@pytest.mark.parametrize(
    "how", ["unparsable", "failed", "timeout", "unavailable", "overloaded", "too_long"]
)
async def test_without_a_verdict_the_policy_says_what_happens(
    opened: Any, fail: str, how: str
) -> None:
    budget_s = 0.05 if how == "timeout" else 30
    async with opened(fail=fail, budget_s=budget_s) as wire:
        if how == "unavailable":
            await wire.batcher.report("small")
            await wire.until(lambda: not is_served(wire.gateway, "large"))
        if how == "overloaded":
            late = ClassReport(priority_class="interactive", expected_wait_ms=1e9)
            await wire.batcher.report("small", batcher="b1")
            await wire.batcher.report("large", batcher="b2", classes=[late])
            await wire.until(lambda: is_served(wire.gateway, "large"))
        text = "x" * 220 if how == "too_long" else "hello"
        sampling = pb.SamplingParams(max_tokens=4)
        call, task = await wire.begin(prompt(text, sampling=sampling), timeout=60)
        if how in ("unparsable", "failed", "timeout"):
            check = await wire.batcher.task("large")
            if how == "unparsable":
                await judge(wire, check, "who knows")
            elif how == "failed":
                error = TaskError(reason="ENGINE_FAILED", message="broken")
                await wire.batcher.send(check, frame(0, end=TASK_END_FAILED, error=error))
            else:
                await wire.batcher.cancelled(check)
        if fail == "closed":
            _, refused = await error_of(call)
            assert refused.metadata["rules"] == f"guard.harm.{how}"
            return
        assert text_of(await wire.end(call, task, ANSWER)) == ANSWER
        record = await explained(wire, task.request_id)
        assert [one.failure for one in record.guards] == [how]
        assert [(one.rule, one.action) for one in record.decisions] == [
            (f"guard.harm.{how}", safety_pb2.SAFETY_ACTION_FLAG)
        ]


async def test_an_objection_to_a_window_ends_the_answer(opened: Any) -> None:
    async with opened(checks=["output"], window_tokens=4) as wire:
        call, task = await wire.begin(prompt("what is it"))
        tokens = wire.tokens(ANSWER)
        await wire.batcher.send(task, frame(0, tokens[:6]))
        assert (await call.read()).HasField("started")
        shown = (await call.read()).delta.text
        check = await wire.batcher.task("large")
        assert ("what is it" in asked(wire, check), shown in asked(wire, check)) == (True, True)
        await judge(wire, check, UNSAFE)
        events = await events_of(call)
        finished = events[-1].finished
        assert text_of(events) == ""  # what was shown stays, and nothing is added
        assert finished.reason == pb.FINISH_REASON_CONTENT_FILTER
        assert list(finished.rules) == ["guard.harm.S1"]
        await wire.batcher.cancelled(task)


async def test_a_threshold_counts_and_the_score_and_the_cost_are_kept(opened: Any) -> None:
    prices = {"large": (1e6, 0.0)}
    async with opened({"prices": prices}, threshold=0.2) as wire:
        call, task = await wire.begin(prompt())
        check = await wire.batcher.task("large")
        assert check.sampling.logprobs
        tokens = wire.tokens("safe")
        top = [tokens[0], wire.tokens("unsafe")[0]]
        logprobs = [Logprobs(logprob=-0.4, top_token_ids=top, top_logprobs=[-0.4, -1.2])]
        await wire.batcher.send(check, frame(0, tokens, logprobs=logprobs, end=TASK_END_LENGTH))
        _, error = await error_of(call)
        assert error.metadata["rules"] == "guard.harm.violation"
        (guard,) = (await explained(wire, task.request_id)).guards
        assert 0.2 < guard.score < 0.5
        assert guard.cost == len(check.prompt_token_ids)


async def test_rows_of_guards_count_for_the_spending_of_the_tenant(opened: Any) -> None:
    routing = {"default": "small", "budgets": [{"per_hour": 1.0, "model": "large"}]}
    async with opened({"prices": {"large": (1e6, 0.0)}, "routing": routing}) as wire:
        call = wire.stub.Generate(prompt(model=""))
        task = await wire.batcher.task("small")  # which costs nothing
        await judge(wire, await wire.batcher.task("large"), "safe")
        await wire.end(call, task)
        call = wire.stub.Generate(prompt(model=""))
        await wire.batcher.task("large")
        assert (await call.read()).started.route.strategy == pb.ROUTE_STRATEGY_BUDGET
        call.cancel()


async def test_a_governed_model_takes_over_before_anything_is_shown(opened: Any) -> None:
    async with opened(action={"route": "large"}) as wire:
        call, first = await wire.begin(prompt())
        check = await wire.batcher.task("large")
        await wire.batcher.send(first, last(0, wire.tokens(ANSWER)))
        await wire.forgotten(first)
        await judge(wire, check, UNSAFE)
        second = await wire.batcher.task("large")
        assert second.request_id == f"{first.request_id}-r1"
        events = await wire.end(call, second, "hello")
        assert text_of(events) == "hello"
        (notice,) = [event.notices[0] for event in events if event.notices]
        assert (notice.kind, notice.model) == (pb.NOTICE_KIND_ESCALATED, "large")
        assert events[-1].finished.model == "large"
        record = await explained(wire, first.request_id)
        assert record.attempts[0].escalation_reason == "guard.harm.S1"
        assert (await audited(wire, first.request_id)).governed_model == "large"


async def test_an_answer_of_the_governed_model_continues(opened: Any) -> None:
    async with opened(action={"route": "small"}) as wire:
        call, task = await wire.begin(prompt())
        await judge(wire, await wire.batcher.task("large"), UNSAFE)
        events = await wire.end(call, task, ANSWER)
        assert text_of(events) == ANSWER
        assert not any(event.notices for event in events)


async def test_a_complete_resumed_answer_is_checked_before_its_end(opened: Any) -> None:
    async with opened(checks=["input", "output"]) as wire:
        held = wire.tokens("hello world")
        sampling = pb.SamplingParams(max_tokens=len(held))
        call = wire.stub.Generate(resumed(prompt(sampling=sampling), held))
        checks = [await wire.batcher.task("large") for _ in range(2)]
        for check in checks:
            await judge(wire, check, "safe")
        events = await events_of(call)
        assert events[-1].finished.reason == pb.FINISH_REASON_LENGTH


async def test_placeholders_are_not_restored_for_guards(nats_url: str, model_folder: Path) -> None:
    iban = "DE89370400440532013000"
    safety = guarded(checks=["input", "output"], window_tokens=0)
    safety["policies"]["default"] |= {"actions": {"pii.*": "redact"}, "restore": True}
    async with open_wire(nats_url, model_folder, safety=safety) as wire:
        call, task = await wire.begin(prompt(f"pay {iban}"))
        checks = [await wire.batcher.task("large")]
        await judge(wire, checks[0], "safe")
        await wire.batcher.send(task, last(0, wire.tokens("<IBAN_1> it is")))
        checks.append(await wire.batcher.task("large"))
        await judge(wire, checks[1], "safe")
        assert text_of(await events_of(call)) == f"{iban} it is"
        assert all(iban not in asked(wire, check) for check in checks)


async def test_every_verdict_is_audited_and_no_text(opened: Any) -> None:
    async with opened(checks=["input", "output"], window_tokens=0) as wire:
        call, task = await wire.begin(prompt())
        await judge(wire, await wire.batcher.task("large"), "safe")
        await wire.batcher.send(task, last(0, wire.tokens(ANSWER)))
        await judge(wire, await wire.batcher.task("large"), UNSAFE)
        await events_of(call)
        entry = await audited(wire, task.request_id)
        assert [(one.rule, one.action, one.in_answer) for one in entry.decisions] == [
            ("guard.harm.pass", safety_pb2.SAFETY_ACTION_ALLOW, False),
            ("guard.harm.S1", safety_pb2.SAFETY_ACTION_BLOCK, True),
        ]
        assert (entry.tenant, entry.blocked, entry.with_text) == ("default", False, False)
        record = await explained(wire, task.request_id)
        assert [one.answer_tokens for one in record.guards] == [0, len(wire.tokens(ANSWER))]
        assert record.finish_reason == pb.FINISH_REASON_CONTENT_FILTER
        assert ANSWER.encode() not in record.SerializeToString()
