"""The same key again: take-over, replay, conflict; and answers that go on where a caller left."""

from sluice.internal.v1.frame_pb2 import ROW_END_STOP
from sluice.v1 import inference_pb2 as pb
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.tokenizer import END
from tests.gateway.kit.wire import Wire, error_of, events_of, prompt, text_of, tokens_of


def keyed(
    text: str = "hello", held: list[int] | None = None, **fields: object
) -> pb.GenerateRequest:
    resume = pb.Resume(token_ids=held) if held else None
    return prompt(text, idempotency_key="k1", resume=resume, **fields)


async def test_a_newer_call_takes_over_from_what_it_holds(wire: Wire) -> None:
    first = wire.stub.Generate(keyed())
    task = await wire.batcher.task()
    answer = wire.tokens("hello world, how are you?")
    await wire.batcher.send(task, frame(0, answer[:3]))
    while (event := await first.read()).WhichOneof("event") != "delta":
        started = event.started
    second = wire.stub.Generate(keyed(held=answer[:2]))
    assert (await second.read()).started.request_id == started.request_id
    code, error = await error_of(first)
    assert (code.name, error.reason) == ("CANCELLED", "CANCELLED")
    await wire.batcher.send(task, last(3, answer[3:]))
    events = await events_of(second)
    assert tokens_of(events) == answer[2:]
    assert not any(m.HasField("cancel") for m in wire.batcher.control)
    assert len(wire.gateway.registry) == 0


async def test_a_newer_call_without_tokens_gets_all_of_it(wire: Wire) -> None:
    first = wire.stub.Generate(keyed())
    task = await wire.batcher.task()
    answer = wire.tokens("hello world")
    await wire.batcher.send(task, frame(0, answer[:2]))
    while (await first.read()).WhichOneof("event") != "delta":
        pass
    second = wire.stub.Generate(keyed())
    await second.read()
    await wire.batcher.send(task, last(2, answer[2:]))
    assert text_of(await events_of(second)) == "hello world"


async def test_a_finished_answer_is_replayed(wire: Wire) -> None:
    first = wire.stub.Generate(keyed())
    task = await wire.batcher.task()
    answer = wire.tokens("hello world")
    await wire.batcher.send(task, last(0, answer))
    once = await events_of(first)
    again = await events_of(wire.stub.Generate(keyed()))
    assert text_of(again) == text_of(once)
    assert again[0].started == once[0].started
    assert again[1].notice.kind == pb.NOTICE_KIND_REPLAYED
    assert again[-1].finished == once[-1].finished
    rest = await events_of(wire.stub.Generate(keyed(held=answer[:1])))
    assert tokens_of(rest) == answer[1:]


async def test_another_request_with_the_same_key_is_refused(wire: Wire) -> None:
    first = wire.stub.Generate(keyed())
    await wire.batcher.task()
    code, error = await error_of(wire.stub.Generate(keyed("something else")))
    assert (code.name, error.reason) == ("ALREADY_EXISTS", "IDEMPOTENCY_KEY_REUSED")
    assert len(wire.gateway.registry) == 1
    first.cancel()


async def test_a_key_is_free_again_after_its_caller_left(wire: Wire) -> None:
    first = wire.stub.Generate(keyed())
    task = await wire.batcher.task()
    answer = wire.tokens("hello world")
    await wire.batcher.send(task, frame(0, answer[:1]))
    first.cancel()
    await wire.batcher.cancelled(task)
    second = wire.stub.Generate(keyed(held=answer[:1]))
    task = await wire.batcher.task()
    assert list(task.produced_token_ids) == answer[:1]
    await wire.batcher.send(task, last(1, answer[1:]))
    assert tokens_of(await events_of(second)) == answer[1:]


async def test_an_answer_goes_on_behind_the_tokens_held(wire: Wire) -> None:
    answer = wire.tokens("naïve 😀 hello")
    for held in range(1, len(answer)):
        call = wire.stub.Generate(prompt(resume=pb.Resume(token_ids=answer[:held])))
        task = await wire.batcher.task()
        assert list(task.produced_token_ids) == answer[:held]
        await wire.batcher.send(task, frame(0, answer[: held + 1]), last(held, answer[held:]))
        events = await events_of(call)
        deltas = [event.delta for event in events if event.HasField("delta")]
        assert deltas[0].index == held
        assert tokens_of(events) == answer[held:]
        assert "naïve 😀 hello".endswith(text_of(events))
        assert events[-1].finished.usage.completion_tokens == len(answer)


async def test_a_complete_answer_needs_no_engine(wire: Wire) -> None:
    held = [*wire.tokens("hello"), *wire.tokens(END)]
    events = await events_of(wire.stub.Generate(prompt(resume=pb.Resume(token_ids=held))))
    assert events[-1].finished.reason == pb.FINISH_REASON_STOP
    limited = pb.SamplingParams(max_tokens=len(held) - 1)
    request = prompt(resume=pb.Resume(token_ids=held[:-1]), sampling=limited)
    events = await events_of(wire.stub.Generate(request))
    assert events[-1].finished.reason == pb.FINISH_REASON_LENGTH
    request = prompt(resume=pb.Resume(token_ids=held[:-1]), sampling=pb.SamplingParams(stop=["lo"]))
    events = await events_of(wire.stub.Generate(request))
    assert events[-1].finished.reason == pb.FINISH_REASON_STOP_SEQUENCE
    assert len(wire.gateway.registry) == 0


async def test_a_stop_string_that_began_in_the_held_tokens_is_found(wire: Wire) -> None:
    answer = [token for letter in "abcd" for token in wire.tokens(letter)]
    request = prompt(
        resume=pb.Resume(token_ids=answer[:2]), sampling=pb.SamplingParams(stop=["bc"])
    )
    call = wire.stub.Generate(request)
    task = await wire.batcher.task()
    await wire.batcher.send(task, frame(2, answer[2:], end=ROW_END_STOP))
    events = await events_of(call)
    assert text_of(events) == ""
    assert events[-1].finished.stop == "bc"
