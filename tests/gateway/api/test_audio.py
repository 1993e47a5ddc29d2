"""Speech: one row for what a model hears at once, a row for each chunk of what is longer. The test is the batcher."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.upstream import chunk_runs
from sluice.errors import InvalidRequest, MessageTooLarge, SafetyBlocked, UnknownModel
from sluice.internal.v1.frame_pb2 import (
    TASK_END_FAILED,
    TASK_END_RETURNED,
    TASK_END_STOP,
    TaskError,
)
from sluice.internal.v1.task_pb2 import Task
from sluice.settings import CacheSettings, ModelSettings
from sluice.v1 import inference_pb2 as pb
from tests.gateway.kit.batcher import frame
from tests.gateway.kit.speech import MODEL, heard, say, speech_model
from tests.gateway.kit.wire import (
    Opened,
    Wire,
    error_of,
    events_of,
    prompt,
    text_of,
    tokens_of,
)
from tests.support.sounds import sound, wav
from tests.support.tiny_whisper import (
    END,
    LANGUAGES,
    NO_TIMESTAMPS,
    POSITIONS,
    PREVIOUS,
    START,
    TASKS,
)

SHORT = sound(1.5)
LONG = sound(4.5, seed=3)
"""Three chunks: they begin 0, 1.33 and 2.67 s in."""
PAIR = {"name": "pair", "pattern": "w11 w12", "must_match": ["w11 w12"]}
ENGLISH = [START, LANGUAGES["<|en|>"], TASKS["transcribe"], NO_TIMESTAMPS]


pytestmark = pytest.mark.wire(audio_max_s=60.0)


@pytest.fixture(scope="module")
def more_models(tmp_path_factory: pytest.TempPathFactory) -> Sequence[ModelSettings]:
    return (speech_model(tmp_path_factory.mktemp("whisper")),)


async def tasks_of(wire: Wire, count: int) -> list[Task]:
    """The next tasks, in the order of their rows."""
    tasks = [await wire.batcher.task(MODEL) for _ in range(count)]
    return sorted(tasks, key=lambda task: task.request_id)


async def spoken(
    wire: Wire, request: pb.GenerateRequest, *answers: Sequence[int]
) -> pb.GenerateTextResponse:
    """Return the answer to speech, of which each chunk is answered with these words."""
    call = wire.stub.GenerateText(request)
    for task, words in zip(await tasks_of(wire, len(answers)), answers, strict=True):
        await say(wire, task, *words)
    response: pb.GenerateTextResponse = await call
    return response


async def test_what_is_heard_at_once_is_a_row(wire: Wire) -> None:
    call = wire.stub.Generate(heard(SHORT))
    task = await wire.batcher.task(MODEL)
    assert task.audio.pcm == SHORT
    assert not task.audio.opening_token_ids
    assert list(task.prompt_token_ids) == ENGLISH
    assert task.sampling.max_tokens == POSITIONS - 4
    assert list(task.sampling.stop_token_ids) == [END]
    await wire.batcher.send(task, frame(0, [5]))
    await say(wire, task, 5, 6)
    events = await events_of(call)
    assert text_of(events) == " w5 w6"
    assert events[0].started.prompt_tokens == 4
    assert events[-1].finished.reason == pb.FINISH_REASON_STOP
    assert events[-1].finished.usage.completion_tokens == 3


async def test_a_wav_file_a_language_to_find_and_the_text_before(wire: Wire) -> None:
    request = pb.GenerateRequest(audio=pb.AudioInput(data=wav(SHORT), prompt="w8 w9"))
    request.audio.task = pb.AUDIO_TASK_TRANSLATE
    request.sampling.max_tokens = 7
    call = wire.stub.GenerateText(request)
    task = await wire.batcher.task(MODEL)
    assert task.audio.pcm == SHORT
    assert list(task.prompt_token_ids) == [PREVIOUS, 8, 9, START]
    assert list(task.audio.opening_token_ids) == [TASKS["translate"], NO_TIMESTAMPS]
    assert task.sampling.max_tokens == 10  # three tokens are no text
    await say(wire, task, LANGUAGES["<|de|>"], TASKS["translate"], NO_TIMESTAMPS, 5)
    answer = await call
    assert (answer.text, answer.started.model) == (" w5", MODEL)
    assert answer.token_ids[0] == LANGUAGES["<|de|>"]


async def test_long_audio_is_a_row_a_chunk_and_one_text(wire: Wire) -> None:
    call = wire.stub.Generate(heard(LONG))
    tasks = await tasks_of(wire, 3)
    assert [len(task.audio.pcm) for task in tasks[:2]] == [64_000, 64_000]
    assert all(list(task.prompt_token_ids) == ENGLISH for task in tasks)
    # Two words of each chunk are in the next one too; the texts come in any order.
    await say(wire, tasks[2], 13, 14, 15)
    await say(wire, tasks[1], 11, 12, 13, 14)
    await say(wire, tasks[0], 9, 10, 11, 12)
    events = await events_of(call)
    assert tokens_of(events) == [9, 10, 11, 12, 13, 14, 15]
    assert events[0].started.prompt_tokens == 12
    assert events[-1].finished.reason == pb.FINISH_REASON_STOP
    assert events[-1].finished.usage.prompt_tokens == 12
    assert len(wire.gateway.registry) == 0


async def test_the_text_of_a_chunk_is_sent_when_the_next_one_is_known(wire: Wire) -> None:
    call = wire.stub.Generate(heard(LONG))
    tasks = await tasks_of(wire, 3)
    assert (await call.read()).HasField("started")
    await say(wire, tasks[0], 9, 10, 11, 12)
    await say(wire, tasks[1], 11, 12, 13, 14)
    assert (await call.read()).delta.text == " w9 w10 w11"
    await say(wire, tasks[2], 13, 14, 15)
    assert text_of(await events_of(call)) == " w12 w13 w14 w15"


async def test_few_chunks_are_computed_at_a_time(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_runs, "CONCURRENT_MAX", 2)
    call = wire.stub.GenerateText(heard(LONG))
    first, second = await tasks_of(wire, 2)
    await say(wire, second, 2, 3)
    assert len(wire.gateway.registry.dispatch._runs) <= 2
    await say(wire, first, 1, 2)
    (third,) = await tasks_of(wire, 1)
    assert third.request_id > second.request_id
    await say(wire, third, 3, 4)
    assert (await call).text == " w1 w2 w2 w3 w3 w4"


async def test_languages_that_are_found_are_no_text(wire: Wire) -> None:
    german, english = LANGUAGES["<|de|>"], LANGUAGES["<|en|>"]
    opening = (TASKS["transcribe"], NO_TIMESTAMPS)
    answers = [
        (language, *opening, *range(2 * place, 2 * place + 4))
        for place, language in enumerate((german, english, german))
    ]
    answer = await spoken(wire, heard(LONG, language=""), *answers)
    assert answer.text == "".join(f" w{number}" for number in range(8))
    assert answer.token_ids[0] == german


@pytest.mark.parametrize("listed", [True, False])
async def test_timestamps_are_no_text(opened: Opened, tmp_path: Path, listed: bool) -> None:
    """A model may write them all the same; older tokenizers do not list them."""
    speech = speech_model(tmp_path, times=100 if listed else 0)
    if not listed:
        config = json.loads((tmp_path / "config.json").read_text())
        config["vocab_size"] += 100
        (tmp_path / "config.json").write_text(json.dumps(config))
    first, last = NO_TIMESTAMPS + 1, NO_TIMESTAMPS + 100
    async with opened(more_models=[speech], audio_max_s=60.0) as wire:
        answer = await spoken(wire, heard(SHORT), [first, 5, 6, last, last, 7, last])
        assert answer.text == " w5 w6 w7"
        assert answer.finished.usage.completion_tokens == 8
        answer = await spoken(
            wire,
            heard(LONG),
            [first, 9, 10, 11, first + 9, 12, last],
            [first, 11, 12, first + 3, 13, 14],
            [13, 14, 15, last],
        )
        assert answer.text == " w9 w10 w11 w12 w13 w14 w15"


async def test_an_answer_of_chunks_ends_at_max_tokens(wire: Wire) -> None:
    params = pb.SamplingParams(max_tokens=3)
    call = wire.stub.GenerateText(heard(LONG, sampling=params))
    tasks = await tasks_of(wire, 3)
    await say(wire, tasks[0], 9, 10, 11)
    await say(wire, tasks[1], 19, 20, 21)
    answer = await call
    assert answer.text == " w9 w10 w11"
    assert answer.finished.reason == pb.FINISH_REASON_LENGTH
    await wire.batcher.cancelled(tasks[2])


async def test_a_stop_string_ends_the_joined_text(wire: Wire) -> None:
    request = heard(LONG, sampling=pb.SamplingParams(stop=["w11 w12"]))
    answer = await spoken(wire, request, [9, 10, 11], [12, 13], [14, 15])
    assert answer.text == " w9 w10 "
    assert answer.finished.reason == pb.FINISH_REASON_STOP_SEQUENCE


async def test_a_chunk_that_fails_ends_the_answer_and_the_other_rows(wire: Wire) -> None:
    call = wire.stub.GenerateText(heard(LONG))
    tasks = await tasks_of(wire, 3)
    error = TaskError(reason="ENGINE_FAILED", message="no number")
    await wire.batcher.send(tasks[1], frame(0, end=TASK_END_FAILED, error=error))
    code, failed = await error_of(call)
    assert (code, failed.message) == (grpc.StatusCode.INTERNAL, "no number")
    await wire.batcher.cancelled(tasks[0])
    await wire.batcher.cancelled(tasks[2])


async def test_a_chunk_that_was_lost_is_sent_again_with_its_audio(wire: Wire) -> None:
    call = wire.stub.Generate(heard(LONG))
    tasks = await tasks_of(wire, 3)
    await wire.batcher.send(tasks[2], frame(0, [12]))
    await wire.until(lambda: _has_tokens(wire, tasks[2]))
    await wire.batcher.forget(tasks[2])
    again = await wire.batcher.task(MODEL)
    assert again.request_id == tasks[2].request_id
    assert list(again.produced_token_ids) == [12]
    assert again.audio == tasks[2].audio
    await say(wire, tasks[0], 9, 10, 11, 12)
    await say(wire, tasks[1], 11, 12, 13)
    await wire.batcher.send(again, frame(1, [13, 14, END], end=TASK_END_STOP))
    events = await events_of(call)
    assert text_of(events) == " w9 w10 w11 w12 w13 w14"
    kinds = [event.notices[0].kind for event in events if event.notices]
    assert kinds == [pb.NOTICE_KIND_RECOVERED]


def _has_tokens(wire: Wire, task: Task) -> bool:
    row = wire.gateway.registry.dispatch._runs.get(task.request_id)
    return row is not None and bool(row.token_ids)


@pytest.mark.wire(safety={"rules": [{**PAIR, "action": "redact"}]})
async def test_a_pattern_over_two_chunks_is_hidden(wire: Wire) -> None:
    answer = await spoken(wire, heard(LONG), [9, 10, 11], [12, 13], [14, 15])
    assert answer.text == " w9 w10 <PAIR_1> w13 w14 w15"


@pytest.mark.wire(safety={"rules": [{**PAIR, "action": "block"}]})
async def test_the_text_before_the_audio_passes_the_input_safety(wire: Wire) -> None:
    request = heard(SHORT)
    request.audio.prompt = "w11 w12"
    _, error = await error_of(wire.stub.GenerateText(request))
    assert isinstance(error, SafetyBlocked)


@pytest.mark.wire(cache=CacheSettings(enabled=True))
async def test_a_kept_answer_is_that_to_the_same_audio(wire: Wire) -> None:
    for number, request in enumerate((heard(SHORT), heard(LONG[: len(SHORT)]))):
        assert (await spoken(wire, request, [5 + number])).text == f" w{5 + number}"
    assert (await wire.stub.GenerateText(heard(SHORT))).text == " w5"


def audio(**fields: Any) -> pb.GenerateRequest:
    given = {"data": SHORT, "format": pb.AUDIO_FORMAT_PCM, **fields}
    return pb.GenerateRequest(audio=pb.AudioInput(**given), model=MODEL)


WRONG = [
    (audio(data=b"abc"), "audio.data", "half a sample"),
    (audio(data=b""), "audio.data", "no samples"),
    (audio(data=b"abcd", format=pb.AUDIO_FORMAT_WAV), "audio.data", "ffmpeg"),
    (audio(data=wav(SHORT, rate=8000), format=0), "audio.data", "8000 Hz"),
    (audio(data=bytes(2 * 16_000 * 61)), "audio.data", "has 61.0 s, the limit is 60 s"),
    (audio(format=9), "audio.format", "must be wav or pcm"),
    (audio(task=9), "audio.task", "must be transcribe or translate"),
    (audio(language="xx"), "audio.language", "known: de, en, fr"),
    (heard(SHORT, sampling=pb.SamplingParams(regex="a")), "sampling.regex", "not audio"),
    (heard(SHORT, raw_prompt=True), "raw_prompt", "not audio"),
    (heard(SHORT, tools=[pb.Tool(name="f")]), "tools", "not audio"),
    (heard(LONG, sampling=pb.SamplingParams(logprobs=1)), "sampling.logprobs", "2 s"),
    (prompt("w1", model=MODEL), "model", "takes audio"),
]  # fmt: skip


async def test_what_is_wrong_is_named(wire: Wire) -> None:
    for request_, field, words in WRONG:
        code, error = await error_of(wire.stub.GenerateText(request_))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert isinstance(error, InvalidRequest)
        assert field in [violation.field for violation in error.violations]
        assert words in error.message


async def test_audio_to_a_model_that_takes_none(wire: Wire) -> None:
    request = heard(SHORT)
    request.model = "small"
    code, error = await error_of(wire.stub.GenerateText(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"small takes no audio; name one that does: {MODEL}" in error.message
    request.model = "nobody"
    _, error = await error_of(wire.stub.GenerateText(request))
    assert isinstance(error, UnknownModel)


async def test_audio_to_a_mesh_that_takes_none(opened: Opened) -> None:
    request = heard(SHORT)
    request.model = ""
    async with opened() as wire:
        _, error = await error_of(wire.stub.GenerateText(request))
    assert isinstance(error, UnknownModel)
    assert error.message == "no model of this mesh takes audio"


async def test_audio_may_be_larger_than_a_message_and_text_not(wire: Wire) -> None:
    call = wire.stub.Generate(heard(bytes(2 * 16_000 * 40)))
    assert (await call.read()).HasField("started")
    call.cancel()
    _, error = await error_of(wire.stub.GenerateText(prompt("w1 " * 500_000)))
    assert isinstance(error, MessageTooLarge)


async def test_what_whisper_hears_at_once_fits_into_a_message_of_nats(
    opened: Opened, tmp_path: Path
) -> None:
    whisper = speech_model(tmp_path, "whisper", 30)
    async with opened(more_models=[whisper]) as wire:
        request = heard(bytes(30 * 32_000))
        request.model, request.audio.prompt = "whisper", "w5 " * 300
        call = wire.stub.GenerateText(request, metadata=[("tracestate", "a=" + "b" * 200)])
        task = await wire.batcher.task("whisper")
        assert len(task.audio.pcm) == 960_000
        await say(wire, task, 5, 6)
        assert (await call).text == " w5 w6"


async def test_a_chunk_without_room_is_sent_again(wire: Wire) -> None:
    call = wire.stub.GenerateText(heard(LONG))
    tasks = await tasks_of(wire, 3)
    error = TaskError(reason="OVERLOADED", message="no room")
    await wire.batcher.send(tasks[1], frame(0, end=TASK_END_RETURNED, error=error))
    again = await wire.batcher.task(MODEL)
    assert again.audio == tasks[1].audio
    await say(wire, tasks[0], 9, 10, 11, 12)
    await say(wire, again, 11, 12, 13, 14)
    await say(wire, tasks[2], 13, 14, 15)
    assert (await call).text == " w9 w10 w11 w12 w13 w14 w15"


async def test_text_is_never_routed_to_a_model_that_hears(wire: Wire) -> None:
    call = asyncio.ensure_future(wire.stub.GenerateText(prompt("hello", model="auto")))
    task = await wire.batcher.task("small")
    assert not task.HasField("audio")
    call.cancel()
