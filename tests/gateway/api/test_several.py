"""Several answers to one request, through a real gateway."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sluice.internal.v1.frame_pb2 import TASK_END_FAILED, TASK_END_LENGTH, Frame, TaskEnd
from sluice.internal.v1.task_pb2 import Task
from sluice.v1 import inference_pb2 as pb
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.wire import Wire, error_of, events_of, prompt, resumed, text_of
from tests.support.events import kinds_of


def several(n: int = 3, **fields: Any) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(n=n, **fields.pop("sampling", {}))
    return prompt(sampling=sampling, **fields)


def ended(token_ids: list[int], end: TaskEnd.ValueType) -> Frame:
    final = last(0, token_ids)
    final.final.end = end
    return final


async def tasks_of(wire: Wire, n: int = 3) -> list[Task]:
    return [await wire.batcher.task() for _ in range(n)]


def by_answer(events: Sequence[pb.GenerateResponse]) -> dict[int, list[pb.GenerateResponse]]:
    answers = defaultdict(list)
    for event in events:
        answers[event.answer_index].append(event)
    return answers


async def answered(wire: Wire, request: pb.GenerateRequest) -> dict[int, list[pb.GenerateResponse]]:
    call = wire.stub.Generate(request)
    for i, task in enumerate(await tasks_of(wire)):
        answer = wire.tokens(f"the answer is {i}")
        await wire.batcher.send(task, frame(0, answer[:2]))
        await wire.batcher.send(task, last(2, answer[2:]))
    return by_answer(await events_of(call))


async def test_each_answer_is_one_of_its_own(wire: Wire) -> None:
    call = wire.stub.Generate(several(sampling={"temperature": 1.0, "seed": 7}))
    tasks = await tasks_of(wire)
    assert len({tuple(task.prompt_token_ids) for task in tasks}) == 1
    assert len({task.request_id for task in tasks}) == 3
    seeds = {task.sampling.seed for task in tasks}
    assert 7 in seeds
    assert len(seeds) == 3
    for task in tasks:
        text = "the first" if task.sampling.seed == 7 else "another"
        await wire.batcher.send(task, ended(wire.tokens(text), TASK_END_LENGTH))
    answers = by_answer(await events_of(call))
    assert sorted(answers) == [0, 1, 2]
    for index, events in answers.items():
        assert kinds_of(events) == ["started", "delta", "finished"]
        assert text_of(events) == ("another" if index else "the first")
        assert events[-1].finished.reason == pb.FINISH_REASON_LENGTH
    counted = [answers[i][-1].finished.usage.prompt_tokens for i in range(3)]
    assert counted == [len(tasks[0].prompt_token_ids), 0, 0]
    again = wire.stub.Generate(several(sampling={"temperature": 1.0, "seed": 7}))
    assert {task.sampling.seed for task in await tasks_of(wire)} == seeds
    again.cancel()


async def test_a_key_names_all_answers(wire: Wire) -> None:
    request = several(idempotency_key="k n")
    first = await answered(wire, request)
    again = by_answer(await events_of(wire.stub.Generate(request)))
    assert {i: text_of(events) for i, events in again.items()} == {
        i: text_of(events) for i, events in first.items()
    }
    assert all(e[1].notices[0].kind == pb.NOTICE_KIND_REPLAYED for e in again.values())


async def test_one_that_fails_ends_the_call_and_the_other_rows(wire: Wire) -> None:
    call = wire.stub.Generate(several())
    tasks = await tasks_of(wire)
    await wire.batcher.send(tasks[1], ended([], TASK_END_FAILED))
    _, error = await error_of(call)
    assert error.reason == "ENGINE_FAILED"
    for task in tasks:
        await wire.forgotten(task)


async def test_what_cannot_have_several_answers_says_so(wire: Wire) -> None:
    for call in (
        wire.stub.GenerateText(several()),
        wire.stub.Generate(resumed(several(), wire.tokens("hello"))),
    ):
        _, error = await error_of(call)
        assert error.reason == "REQUEST_INVALID"


async def test_each_answer_has_a_record_and_a_span(wire: Wire) -> None:
    answers = await answered(wire, several())
    ids = {events[0].started.request_id for events in answers.values()}
    traces = {events[0].started.trace_id for events in answers.values()}
    assert len(ids) == 3
    assert len(traces) == 1
    spans = [s for s in wire.spans.get_finished_spans() if s.name.endswith("/Generate")]
    top = [span for span in spans if span.parent is None]
    assert len(spans) == 4
    assert [span.attributes["gen_ai.response.finish_reasons"] for span in top] == [("stop",) * 3]
