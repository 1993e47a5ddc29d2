"""What is assembled from an answer is filtered too: text around calls, reasoning, values that JSON wrote otherwise."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gateway.models.tokenizer import ModelTokenizer
from gateway.models.tools import (
    FORMATS,
    HERMES,
    LLAMA3,
    MISTRAL,
    FunctionTool,
    ToolFormat,
    ToolUse,
    map_texts,
)
from gateway.safety.findings import Finding, Placeholders
from gateway.safety.output.filter import OutputFilter
from gateway.safety.output.redactor import AssembledFilter, OutputRules
from gateway.streaming.part_events import PartEvents
from sluice.v1 import inference_pb2 as pb
from sluice.wire.text_tokens import REASONING, REASONING_END
from tests.gateway.safety.output.kit import random_pieces
from tests.gateway.safety.output.test_filter import shared

USE = ToolUse((FunctionTool("pay", "Pays.", {}),))
CARD = "4111111111111111"
REDACTS = shared(actions={"*": "redact", "pii.phone": "allow"})
BLOCKS = shared(actions={"*": "block", "pii.phone": "allow"})
CANARY = shared({"canaries": ["zebra-7781"]}, actions={})


class Seen:
    """What a caller gets of one answer."""

    def __init__(self, rules: OutputRules, form: ToolFormat, placeholders: Placeholders) -> None:
        tokenizer = SimpleNamespace(marks_reasoning=True, tool_format=form)
        self.parts = PartEvents(
            USE,
            lambda _: cast(ModelTokenizer, tokenizer),
            lambda _: "",
            new_filter=lambda: AssembledFilter(rules),
        )
        self.filter = OutputFilter(rules, placeholders)
        self.text, self.reasoning, self.reason = "", "", 0
        self.calls: list[dict[str, Any]] = []
        self._take(pb.GenerateResponse(started=pb.Started(model="m")))

    def push(self, text: str, index: int) -> None:
        delta = pb.Delta(text=self.filter.push(text), index=index, token_ids=[index])
        self._take(pb.GenerateResponse(delta=delta))

    def finish(self) -> None:
        delta = pb.Delta(text=self.filter.finish())
        finished = pb.Finished(reason=pb.FINISH_REASON_STOP)
        self._take(pb.GenerateResponse(delta=delta, finished=finished))

    def _take(self, response: pb.GenerateResponse) -> None:
        if self.parts.change(response):
            self.text += response.delta.text
            self.reasoning += response.delta.reasoning
            self.calls += [json.loads(one.arguments) for one in response.delta.tool_calls]
            self.reason = response.finished.reason

    @property
    def all_texts(self) -> list[str]:
        texts = [self.text, self.reasoning]

        def note(text: str) -> str:
            texts.append(text)
            return text

        map_texts(self.calls, note)
        return texts


def seen(text: str, rules: OutputRules = REDACTS, form: ToolFormat = HERMES, seed: int = 0) -> Seen:
    made = Seen(rules, form, Placeholders())
    for index, piece in enumerate(random_pieces(text, random.Random(seed))):
        made.push(piece, index)
    made.finish()
    return made


def call(arguments: str, form: ToolFormat = HERMES) -> str:
    written = f'{{"name": "pay", "{form.arguments}": {arguments}}}'
    return f"{form.opening}{form.start}{written}{form.closing}"


@pytest.mark.parametrize(
    "arguments",
    [
        f'{{"card": "{CARD}"}}',
        f'{{"card": "\\u0034{CARD[1:]}"}}',
        f'{{"note": "see\\n{CARD}"}}',
        f'{{"{CARD[:-1]}\\u0031": 1}}',
        '{"card": 4.111111111111111e15}',
        f'{{"card": {CARD}.0}}',
        f'{{"cards": [{{"no": ["x", {CARD}0e-1]}}]}}',
        json.dumps({"body": json.dumps({"card": f"\\u0034{CARD[1:]}"})}).replace(
            "\\\\\\\\", "\\\\"
        ),
        '{"card": "4111\\u001b[0m111111111111"}',
    ],
)
def test_values_inside_a_call_are_read_as_the_caller_reads_them(arguments: str) -> None:
    for seed in range(3):
        made = seen(f"I pay. {call(arguments)}", seed=seed)
        assert CARD not in str(made.calls) + made.text
        assert "<PAYMENT_CARD_" in str(made.calls) + made.text


@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA3])
def test_text_around_a_call_is_one_text(form: ToolFormat) -> None:
    for at in range(1, len(CARD)):
        made = seen(f"card {CARD[:at]}{call('{}', form)}{CARD[at:]}.", form=form, seed=at)
        assert made.calls == [{}]
        assert made.text == "card <PAYMENT_CARD_1>."


def test_reasoning_in_the_middle_joins_nothing() -> None:
    made = seen(
        f"{REASONING}so {CARD[:5]}{REASONING_END}A {CARD[:9]}{REASONING}{CARD[5:]}{REASONING_END}{CARD[9:]}"
    )
    assert (made.text, made.reasoning) == ("A <PAYMENT_CARD_1>", "so <PAYMENT_CARD_1>")


class NoScanner:
    """A scanner that must not be asked."""

    def scan(self, text: str) -> list[Finding]:
        pytest.fail(f"scanned {text!r}")


def test_a_text_as_it_was_written_is_not_scanned() -> None:
    rules = replace(REDACTS, scanner=NoScanner())
    text, filter_ = f"card {CARD[:6]}", AssembledFilter(rules)
    for piece in (text[:3], text[3:]):
        filter_.note(piece)
        text = text.removeprefix(filter_.push(piece))
    assert filter_.finish() == (text, "")
    assert text


def test_a_canary_around_a_call_ends_the_answer() -> None:
    made = seen(f"so zebra{call('{}')}-7781 it is {call('{}')}", CANARY)
    assert made.reason == pb.FINISH_REASON_CONTENT_FILTER
    assert made.parts.blocked == ("output.canary",)
    assert "zebra" not in made.text
    assert "it is" not in made.text


def test_a_value_that_blocks_ends_the_answer_before_its_call() -> None:
    paid = call('{"card": 4.111111111111111e15}')
    made = seen(f"I pay. {paid} done {call('{}')}", BLOCKS)
    assert made.reason == pb.FINISH_REASON_CONTENT_FILTER
    assert not made.calls
    assert "I pay.".startswith(made.text)


def test_the_callers_own_value_stays_in_a_call() -> None:
    rules = shared(restore=True)
    own = Placeholders()
    own.of("pii.email", "me@home.org")
    made = Seen(rules, HERMES, own)
    sent = call(r'{"to": "<EMAIL_1>", "a": "x\n"}')
    made.push(f"To <EMAIL_1>: {sent} <EMAIL_1>", 0)
    made.finish()
    assert made.calls == [{"to": "me@home.org", "a": "x\n"}]
    assert made.text == "To me@home.org: me@home.org"


def test_answers_without_secrets_are_unchanged() -> None:
    first, second = call(r'{"a": "b\n", "n": 1.5}'), call('{"c": [1e3]}')
    text = f"First. {first} Then {second} done."
    made = seen(text)
    assert made.text == "First. Then done."
    assert made.calls == [{"a": "b\n", "n": 1.5}, {"c": [1000.0]}]


SECRETS = (CARD, "123-45-6789", "AKIAIOSFODNN7EXAMPLE", "john.smith@example.com")


@given(st.sampled_from(SECRETS), st.sampled_from(sorted(FORMATS)), st.integers(0, 1 << 32))
def test_a_secret_split_in_any_way_never_leaves(secret: str, name: str, seed: int) -> None:
    rng, form = random.Random(seed), FORMATS[name]
    escaped = "".join(f"\\u{ord(one):04X}" if rng.random() < 0.5 else one for one in secret)
    at = rng.randint(1, len(secret) - 1)
    inside = rng.choice(("", "\u200b", "\x1b[1m", "\x07"))
    split = secret[:at] + inside + secret[at:]
    parts = [
        f"A {secret[:at]}{call('{}', form)}{secret[at:]} B",
        call(f'{{"v": "{escaped}", "{escaped}": 1}}', form),
        f" {split} ",
        f"{REASONING}R {split} {REASONING_END}",
    ]
    rng.shuffle(parts)
    made = seen(" x ".join(parts), form=form, seed=seed)
    for text in made.all_texts:
        assert secret not in text.replace("\u200b", "").replace("\x1b[1m", "").replace("\x07", "")
