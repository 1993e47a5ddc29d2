"""Calls in the text of an answer: the same however it is cut, and text where they are none."""

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from gateway.models.tool_events import Parsed, ToolCallParser
from gateway.models.tools import (
    FORMATS,
    HERMES,
    LLAMA3,
    MISTRAL,
    FunctionTool,
    ToolFormat,
    ToolUse,
    grammar_of,
)
from sluice.constraints import compile_grammar, lark_grammar, problem_of
from sluice.v1.inference_pb2 import ToolCall

NAMES = ("now", "weather")


def parse(form: ToolFormat, pieces: Sequence[str], **options: Any) -> Parsed:
    parser, whole = ToolCallParser(form, NAMES, **options), Parsed()
    for parsed in (*map(parser.push, pieces), Parsed(parser.flush())):
        whole.text += parsed.text
        whole.calls += parsed.calls
    return whole


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))


OSLO = call("weather", city="Oslo")
NOW = call("now")
ANSWERS: list[tuple[ToolFormat, str, str, list[ToolCall]]] = [
    (
        HERMES,
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        "",
        [OSLO],
    ),
    (
        HERMES,
        'Let me look.\n<tool_call>{"name":"weather","arguments":{"city":"Oslo"}}</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n',
        "Let me look.",
        [OSLO, NOW],
    ),
    (HERMES, '<tool_call>{"name": "now"}', "", [NOW]),
    (HERMES, '<tool_call>{"name": "now"}</tool', "", [NOW]),
    (HERMES, '<tool_call>{"name": "now"}</tool_call> and more', " and more", [NOW]),
    (HERMES, 'So\n<tool_call>{"name": "now"}</tool_call>, and', "So, and", [NOW]),
    (HERMES, '<tool_call>{"name": "now"}</tool_call> 1 <', " 1 <", [NOW]),
    (HERMES, '<tool_call>{"name": "now"} </', "", [NOW]),
    (
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call> \\"}{"}}</tool_call>',
        "",
        [call("weather", city='</tool_call> "}{')],
    ),
    (HERMES, '<tool_c<tool_call>{"name": "now"}</tool_call>', "<tool_c", [NOW]),
    (LLAMA3, '{"name": "weather", "parameters": {"city": "Oslo"}}', "", [OSLO]),
    (
        LLAMA3,
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "now", "parameters": {}}',
        "",
        [OSLO, NOW],
    ),
    (LLAMA3, ' {"name": "now", "parameters": {}} done', " done", [NOW]),
    (LLAMA3, '{"name": "now"};', "", [NOW]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]', "", [OSLO]),
    (
        MISTRAL,
        'Wait. [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "now", "arguments": {}}]',
        "Wait.",
        [OSLO, NOW],
    ),
    (MISTRAL, '[TOOL_CALLS][{"name": "now"}, {"name": "other"}]', ', {"name": "other"}]', [NOW]),
]
UNCHANGED: list[tuple[ToolFormat, str]] = [
    (HERMES, ""),
    (HERMES, " hello\n"),
    (HERMES, "<tool_call>"),
    (HERMES, "<tool_call>now</tool_call>"),
    (HERMES, "<tool_call></tool_call>x"),
    (HERMES, '<tool_call>{"name": "now", }</tool_call>'),
    (HERMES, '<tool_call>{"name": "none"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "now", "arguments": 3}'),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a"'),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"x": NaN}}'),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"x": 1e999}}'),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"x": "\\ud800"}}'),
    (HERMES, '<tool_call>{"name": ["now"]}'),
    (LLAMA3, " ;"),
    (LLAMA3, '{"name": "Anna", "age": 3}'),
    (LLAMA3, 'see {"name": "now"}'),
    (LLAMA3, '<|python_tag|>print("x")'),
    (MISTRAL, "[TOOL_CALLS] nothing"),
    (MISTRAL, "[TOOL_CALLS] []"),
]


@pytest.mark.parametrize(("form", "answer", "text", "calls"), ANSWERS)
def test_answers(form: ToolFormat, answer: str, text: str, calls: list[ToolCall]) -> None:
    assert parse(form, [answer]) == Parsed(text, calls)
    assert parse(form, list(answer)) == Parsed(text, calls), "a character at a time"


@pytest.mark.parametrize(("form", "answer"), UNCHANGED)
def test_text_that_is_no_call_stays_text(form: ToolFormat, answer: str) -> None:
    assert parse(form, [answer]) == parse(form, list(answer)) == Parsed(answer, [])


PARTS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<|python_tag|>",
            "[TOOL_CALLS]",
            "[",
            "]",
            "{",
            "}",
            ",",
            ";",
        ),
        *('"', "\\", '{"name": "now"', ', "arguments": {}', '"name": "weather"', ":", "<tool", "é"),
        *(
            '{"name": "now", "parameters": {}}',
            '{"name": "weather", "arguments": {"city": "Oslo"}}',
        ),
        *("\n", " ", "hello", "[TOOL", "{" * 2000),
    ]
)


@given(
    form=st.sampled_from(sorted(FORMATS)),
    parts=st.lists(PARTS, max_size=12),
    single=st.booleans(),
    data=st.data(),
)
def test_how_an_answer_is_cut_changes_nothing(
    form: str, parts: list[str], single: bool, data: st.DataObject
) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=20)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(FORMATS[form], [text], single=single)
    assert parse(FORMATS[form], pieces, single=single) == whole
    if len(text) < 200:
        assert parse(FORMATS[form], list(text), single=single) == whole
    assert single is False or len(whole.calls) <= 1
    if not whole.calls:
        assert whole.text == text


def test_further_calls_are_dropped_where_only_one_is_wanted() -> None:
    answer = '<tool_call>{"name": "now"}</tool_call>' * 3
    assert parse(HERMES, [answer], single=True) == Parsed("", [NOW])


SCHEMA = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "maxLength": 9}},
}


@pytest.mark.parametrize("form", FORMATS.values(), ids=str)
def test_what_the_grammar_lets_through_are_calls(form: ToolFormat) -> None:
    """Random bytes that the grammar allows, as a random model would draw them."""
    use = ToolUse((FunctionTool("weather", "", SCHEMA), FunctionTool("now", "", {})), required=True)
    grammar, tokenizer = grammar_of(form, use), LLTokenizer("byte")
    assert problem_of("grammar", grammar) is None
    for seed in range(4):
        draw, matcher, answer = (
            random.Random(seed),
            compile_grammar(lark_grammar(grammar), tokenizer),
            b"",
        )
        mask = allocate_token_bitmask(1, tokenizer.vocab_size)
        while not (matcher.is_accepting() and draw.random() < 0.5) and not matcher.is_stopped():
            fill_next_token_bitmask(matcher, mask)
            bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")[:127]
            token = draw.choice(np.flatnonzero(bits).tolist())
            assert matcher.try_consume_tokens([token]) == 1
            answer += bytes([token])
        found = parse(form, [answer.decode()])
        assert found.calls
        assert found.text == ""
        for one in found.calls:
            arguments = json.loads(one.arguments)
            assert arguments == {} if one.name == "now" else len(arguments["city"]) <= 9


@pytest.mark.parametrize("form", FORMATS.values(), ids=str)
def test_an_answer_is_calls_or_of_the_schema(form: ToolFormat) -> None:
    wanted = json.dumps(
        {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    )
    use = ToolUse(
        (FunctionTool("weather", "", SCHEMA), FunctionTool("now", "", {}, strict=True)),
        schema=wanted,
    )
    assert use.constrained
    grammar = grammar_of(form, use)
    assert problem_of("grammar", grammar) is None
    start = f"{form.opening}{form.start}" + "\n" * (not form.many)
    end = "\n" * (not form.many) + form.closing
    call = f'{start}{{"name": "weather", "{form.arguments}": {{"town": 1}}}}{end}'
    for text in (call, '{"n": 7}', '{"n":7}'):
        assert accepts(grammar, text) == (len(text), True), text
    for text in ("Hello", '{"n": "x"', "I look. " + call):
        assert accepts(grammar, text)[0] < len(text), text
    assert accepts(grammar, "")[1] is False


def test_a_grammar_that_would_hold_up_a_worker_is_refused() -> None:
    large = {"type": "object", "description": "x" * 60_000}
    use = ToolUse(tuple(FunctionTool(f"f{i}", "", large) for i in range(3)), required=True)
    assert problem_of("grammar", grammar_of(HERMES, use)) == "must have at most 131072 bytes"


def accepts(grammar: str, text: str) -> tuple[int, bool]:
    """How many characters of ``text`` the grammar lets through, and whether the answer may end there."""
    matcher = compile_grammar(lark_grammar(grammar), LLTokenizer("byte"))
    return matcher.try_consume_tokens(list(text.encode())), matcher.is_accepting()


@pytest.mark.parametrize("form", FORMATS.values(), ids=str)
def test_strict_tools_constrain_free_answers(form: ToolFormat) -> None:
    use = ToolUse(
        (FunctionTool("weather", "", SCHEMA, strict=True), FunctionTool("now", "", SCHEMA))
    )
    grammar = grammar_of(form, use)
    assert problem_of("grammar", grammar) is None
    start = "" if form.bare else f"{form.opening}{form.start}" + "\n" * (not form.many)
    end = "\n" * (not form.many) + form.closing

    def written(name: str, arguments: str) -> str:
        return f'{start}{{"name": "{name}", "{form.arguments}": {arguments}}}'

    whole = ["", "Hello, world.", "a < b [x] {y}", written("weather", '{"city": "Oslo"}') + end]
    whole.append(written("now", '{"anything": 1}') + end)
    if not form.bare:
        whole.append("I look. " + whole[-1])
    for text in whole:
        assert accepts(grammar, text) == (len(text), True), text
    for bad in ('{"town"', '{"city": 1', '{"city": "far too long a name"'):
        text = written("weather", bad)
        assert accepts(grammar, text)[0] < len(text), text
    unknown = written("other", "{}")
    assert accepts(grammar, unknown)[0] < len(unknown)
