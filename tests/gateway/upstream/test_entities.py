"""Token classifiers on a call's way: prompts wait for them, answers are held; before a real nats-server."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from sluice.internal.v1.frame_pb2 import TASK_END_FAILED, TASK_END_STOP, Final, Frame, TaskError
from sluice.internal.v1.task_pb2 import Task
from sluice.settings import CacheSettings, ModelSettings
from sluice.telemetry import names
from sluice.v1 import inference_pb2 as pb
from sluice.v1 import safety_pb2
from tests.gateway.kit.batcher import TIMINGS, frame, last
from tests.gateway.kit.cascades import explained
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
from tests.support.tiny_tagger import LABELS, WORDS, save_tagger

ANSWER = "It was Anna Smith of New York who said so. Then she went home to Karlsruhe."
HIDDEN = "It was <PER_1> of <LOC_1> who said so. Then she went home to <LOC_2>."


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tagger(tmp_path_factory.mktemp("tagger"))


class Tagger:
    """Plays the worker of the token classifier."""

    def __init__(self, wire: Wire, folder: Path) -> None:
        self._wire = wire
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.texts: list[str] = []

    async def read(self, priority_class: str = "interactive") -> None:
        await self.answer(await self._wire.batcher.task("ner", priority_class))

    async def answer(self, task: Task) -> None:
        await self._wire.batcher.send(task, self._labelled(task))

    async def serve(self) -> None:
        while True:
            await self.read()

    def _labelled(self, task: Task) -> Frame:
        self.texts.append(self._tokenizer.decode(list(task.prompt_token_ids)))
        values = array("f")
        for token_id in task.prompt_token_ids:
            word = self._tokenizer.id_to_token(token_id)
            label = next((one for one, words in WORDS.items() if word in words), "O")
            values.extend((LABELS.index(label), 0.99))
        return Frame(final=Final(end=TASK_END_STOP, values=values.tobytes(), timings=TIMINGS))


@pytest.fixture
def opened(nats_url: str, model_folder: Path, tagger: Path) -> Any:
    """Opens a gateway with a token classifier for prompts, unless it is told otherwise."""

    @asynccontextmanager
    async def open_with(
        actions: dict[str, Any] | None = None, policy: dict[str, Any] | None = None, **keys: Any
    ) -> AsyncIterator[tuple[Wire, Tagger]]:
        model = ModelSettings(name="ner", path=str(tagger), engine="token_classifier")
        guard = {"model": "ner", "template": "token_classifier", "budget_s": 30, **keys}
        default = {"actions": actions or {"ner.*": "redact"}, "guard": {"names": guard}}
        safety = {"policies": {"default": {**default, **(policy or {})}}}
        cache = CacheSettings(enabled=True)
        async with open_wire(
            nats_url, model_folder, safety=safety, more_models=[model], cache=cache
        ) as wire:
            await wire.ready("small", "large", "ner")
            yield wire, Tagger(wire, tagger)

    return open_with


@asynccontextmanager
async def serving(tagger: Tagger) -> AsyncIterator[None]:
    task = asyncio.ensure_future(tagger.serve())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def seen_by(wire: Wire, task: Task) -> str:
    return wire.catalog["small"].tokenizer.tokenizer.decode(list(task.prompt_token_ids))


async def test_names_in_a_prompt_are_redacted_before_a_model_sees_them(opened: Any) -> None:
    async with opened({"ner.*": "redact", "pii.*": "redact"}, {"restore": True}) as (wire, tagger):
        call = wire.stub.Generate(prompt("Ask Anna Smith, Anna.Smith@example.org, in New York"))
        await tagger.read()
        task = await wire.batcher.task("small")
        assert seen_by(wire, task) == "Ask <PER_1>, <EMAIL_1>, in <LOC_1>"
        assert text_of(await wire.end(call, task, "I asked <PER_1>")) == "I asked Anna Smith"
        span = wire.span(names.SPAN_GUARD)
        assert span.attributes[names.GUARDRAIL_TARGET] == "input"
        assert set(span.attributes[names.GUARDRAIL_OUTCOMES]) == {
            "guard.names.per:allow",
            "guard.names.loc:allow",
        }


async def test_long_texts_are_read_in_segments_and_every_turn_is(opened: Any) -> None:
    async with opened() as (wire, tagger):
        turns = [
            pb.ChatMessage(role=pb.ROLE_USER, content="a b c d " * 8 + "Anna Smith " + "e f " * 16),
            pb.ChatMessage(role=pb.ROLE_ASSISTANT, content="Ben?"),
            pb.ChatMessage(role=pb.ROLE_USER, content="Anna Smith"),
        ]
        async with serving(tagger):
            call = wire.stub.Generate(
                pb.GenerateRequest(chat=pb.ChatInput(messages=turns), model="small")
            )
            task = await wire.batcher.task("small")
        text = seen_by(wire, task)
        assert text.count("<PER_1>") == 2
        assert "<PER_2>" in text
        assert "Anna" not in text
        assert len(tagger.texts) > 3
        call.cancel()


async def test_an_entity_may_be_refused_or_flagged(opened: Any) -> None:
    async with opened({"ner.per": "block", "ner.loc": "flag"}) as (wire, tagger), serving(tagger):
        _, error = await error_of(wire.stub.Generate(prompt("call Mia")))
        assert error.metadata["rules"] == "ner.per"
        call, task = await wire.begin(prompt("off to Berlin"))
        assert seen_by(wire, task) == "off to Berlin"
        await wire.end(call, task)
        record = await explained(wire, task.request_id)
        assert [(one.rule, one.action) for one in record.decisions] == [
            ("ner.loc", safety_pb2.SAFETY_ACTION_FLAG)
        ]
        assert [(one.guard, list(one.categories)) for one in record.guards] == [("names", ["loc"])]


@pytest.mark.parametrize("fail", ["open", "closed"])
@pytest.mark.parametrize("how", ["failed", "timeout", "unavailable"])
async def test_policy_decides_about_an_unchecked_prompt(opened: Any, fail: str, how: str) -> None:
    async with opened(fail=fail, budget_s=0.05 if how == "timeout" else 30) as (wire, _):
        if how == "unavailable":
            await wire.batcher.report("small")
            await wire.until(lambda: not is_served(wire.gateway, "ner"))
        call = wire.stub.Generate(prompt("call Mia"))
        if how != "unavailable":
            check = await wire.batcher.task("ner")
            if how == "failed":
                error = TaskError(reason="ENGINE_FAILED", message="broken")
                await wire.batcher.send(check, frame(0, end=TASK_END_FAILED, error=error))
        if fail == "closed":
            _, refused = await error_of(call)
            assert refused.metadata["rules"] == f"guard.names.{how}"
            return
        task = await wire.batcher.task("small")
        assert seen_by(wire, task) == "call Mia"
        await wire.end(call, task)
        record = await explained(wire, task.request_id)
        assert [one.failure for one in record.guards] == [how]


async def test_a_check_of_a_text_shows_what_is_found(opened: Any) -> None:
    async with opened() as (wire, tagger):
        call = wire.safety.CheckText(safety_pb2.CheckTextRequest(text="ask Mia Lee now"))
        await tagger.read("standard")
        checked = await call
        assert checked.text == "ask <PER_1> now"
        (found,) = checked.findings
        assert (found.rule, found.start, found.end) == ("ner.per", 4, 11)


async def test_an_answer_shows_when_it_has_been_read(opened: Any) -> None:
    async with opened(checks=["output"]) as (wire, tagger):
        call, task = await wire.begin(prompt(idempotency_key="k"))
        tokens = wire.tokens(ANSWER)
        half = len(wire.tokens("It was Anna Smith of New York who said so. Then"))
        await wire.batcher.send(task, frame(0, tokens[:half]))
        assert (await call.read()).HasField("started")
        await tagger.read()
        assert (await call.read()).delta.text == "It was <PER_1> of <LOC_1> who said so. "
        await wire.batcher.send(task, last(half, tokens[half:]))
        await wire.forgotten(task)
        await tagger.read()
        events = await events_of(call)
        assert text_of(events) == "Then she went home to <LOC_2>."
        assert events[-1].finished.reason == pb.FINISH_REASON_STOP
        assert events[-1].finished.usage.completion_tokens == len(tokens)
        again = await events_of(wire.stub.Generate(prompt(idempotency_key="k")))
        assert text_of(again) == HIDDEN
        record = await explained(wire, task.request_id)
        assert [one.in_answer for one in record.guards] == [True, True]
        found = {one.rule: one.count for one in record.decisions if one.rule.startswith("ner.")}
        assert found == {"ner.per": 1, "ner.loc": 2}


async def test_a_refused_entity_ends_the_answer_before_it(opened: Any) -> None:
    async with opened({"ner.per": "block"}, checks=["output"]) as (wire, tagger), serving(tagger):
        call, task = await wire.begin(prompt())
        await wire.batcher.send(task, frame(0, wire.tokens(ANSWER)))
        events = await events_of(call)
        assert text_of(events) == "It was "
        assert events[-1].finished.reason == pb.FINISH_REASON_CONTENT_FILTER
        assert list(events[-1].finished.rules) == ["ner.per"]
        await wire.batcher.cancelled(task)


@pytest.mark.parametrize("fail", ["open", "closed"])
async def test_policy_decides_about_an_unchecked_answer(opened: Any, fail: str) -> None:
    async with opened(checks=["output"], fail=fail, budget_s=0.05) as (wire, _):
        call, task = await wire.begin(prompt())
        events = await wire.end(call, task, "said Mia")
        assert text_of(events) == ("said Mia" if fail == "open" else "")
        rules = list(events[-1].finished.rules)
        assert rules == ([] if fail == "open" else ["guard.names.timeout"])


async def test_a_resumed_answer_is_read_again_and_goes_on(opened: Any) -> None:
    async with opened(checks=["output"]) as (wire, tagger), serving(tagger):
        call, task = await wire.begin(prompt())
        tokens = wire.tokens(ANSWER)
        half = len(wire.tokens("It was Anna Smith of New York who said so. Then"))
        await wire.batcher.send(task, frame(0, tokens[:half]))
        assert (await call.read()).HasField("started")
        delta = (await call.read()).delta
        held = [None if i in delta.hidden_indexes else t for i, t in enumerate(delta.token_ids)]
        call.cancel()
        await wire.batcher.cancelled(task)
        call, task = await wire.begin(resumed(prompt(), held, "small"))
        start = len(task.produced_token_ids)
        await wire.batcher.send(task, last(start, tokens[start:]))
        assert text_of(await events_of(call)) == "Then she went home to <LOC_2>."
