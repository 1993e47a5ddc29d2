"""The same key again: take-over, replay, conflict; and answers that go on where a caller left."""

from sluice.v1 import inference_pb2 as pb
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.tokenizer import END, SPECIALS
from tests.gateway.kit.wire import Wire, error_of, events_of, prompt, resumed, text_of, tokens_of
from tests.support.events import kind_of


def keyed(
    text: str = "hello", held: list[int] | None = None, **fields: object
) -> pb.GenerateRequest:
    request = prompt(text, idempotency_key="k1", **fields)
    return resumed(request, held) if held else request


async def test_a_newer_call_takes_over_from_what_it_holds(wire: Wire) -> None:
    first, task = await wire.begin(keyed())
    answer = wire.tokens("hello world, how are you?")
    await wire.batcher.send(task, frame(0, answer[:3]))
    while kind_of(event := await first.read()) != "delta":
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


async def test_a_finished_answer_is_replayed(wire: Wire) -> None:
    first, task = await wire.begin(keyed())
    answer = wire.tokens("hello world")
    await wire.batcher.send(task, last(0, answer))
    once = await events_of(first)
    again = await events_of(wire.stub.Generate(keyed()))
    assert text_of(again) == text_of(once)
    assert again[0].started == once[0].started
    assert again[1].notices[0].kind == pb.NOTICE_KIND_REPLAYED
    assert again[-1].finished == once[-1].finished
    rest = await events_of(wire.stub.Generate(keyed(held=answer[:1])))
    assert tokens_of(rest) == answer[1:]
    resume_tokens = {last_resume_token(events) for events in (once, again, rest)}
    assert resume_tokens == {resumed(keyed(), answer).resume.resume_token}


def last_resume_token(events: list[pb.GenerateResponse]) -> bytes:
    return next(e.delta.resume_token for e in reversed(events) if e.delta.token_ids)


async def test_another_request_with_the_same_key_is_refused(wire: Wire) -> None:
    first = wire.stub.Generate(keyed())
    await wire.batcher.task()
    code, error = await error_of(wire.stub.Generate(keyed("something else")))
    assert (code.name, error.reason) == ("ALREADY_EXISTS", "IDEMPOTENCY_KEY_REUSED")
    assert len(wire.gateway.registry) == 1
    first.cancel()


async def test_a_key_is_free_again_after_its_caller_left(wire: Wire) -> None:
    first, task = await wire.begin(keyed())
    answer = wire.tokens("hello world")
    await wire.batcher.send(task, frame(0, answer[:1]))
    first.cancel()
    await wire.batcher.cancelled(task)
    second, task = await wire.begin(keyed(held=answer[:1]))
    assert list(task.produced_token_ids) == answer[:1]
    await wire.batcher.send(task, last(1, answer[1:]))
    assert tokens_of(await events_of(second)) == answer[1:]


async def test_tokens_that_no_gateway_sent_are_refused(wire: Wire) -> None:
    control = [wire.catalog["small"].tokenizer.tokenizer.token_to_id(token) for token in SPECIALS]
    asked, answer = prompt(), wire.tokens("hello world")
    good = resumed(asked, answer)
    forged = [
        prompt(resume=pb.Resume(token_ids=control)),
        prompt(resume=pb.Resume(token_ids=control, resume_token=good.resume.resume_token)),
        prompt(resume=pb.Resume(token_ids=answer[:-1], resume_token=good.resume.resume_token)),
        prompt("another", resume=good.resume),
        prompt(resume=good.resume, model="large"),
        prompt(resume=good.resume, sampling=pb.SamplingParams(temperature=1.0, seed=2)),
    ]
    for request in forged:
        code, error = await error_of(wire.stub.Generate(request))
        assert (code.name, error.reason) == ("INVALID_ARGUMENT", "REQUEST_INVALID")
        assert [violation.field for violation in error.violations] == ["resume.resume_token"]
    assert len(wire.gateway.registry) == 0


async def test_a_complete_answer_needs_no_engine(wire: Wire) -> None:
    held = [*wire.tokens("hello"), *wire.tokens(END)]
    events = await events_of(wire.stub.Generate(resumed(prompt(), held)))
    assert events[-1].finished.reason == pb.FINISH_REASON_STOP
    limited = pb.SamplingParams(max_tokens=len(held) - 1)
    request = resumed(prompt(sampling=limited), held[:-1])
    events = await events_of(wire.stub.Generate(request))
    assert events[-1].finished.reason == pb.FINISH_REASON_LENGTH
    request = resumed(prompt(sampling=pb.SamplingParams(stop=["lo"])), held[:-1])
    events = await events_of(wire.stub.Generate(request))
    assert events[-1].finished.reason == pb.FINISH_REASON_STOP_SEQUENCE
    assert len(wire.gateway.registry) == 0
