"""How pieces of tool calls become calls, however a server numbers them."""

import json
import re
from typing import Any

import pytest

from model_workers.remote.calls import CALLS_CHARS_MAX, CALLS_MAX, CallText
from model_workers.remote.faults import ServerFault
from tests.support.openai_server import CALL_PIECES, call_piece

OSLO, ROME = '{"city": "Oslo"}', '{"city": "Rome"}'
_ABSENT: Any = object()


def piece(arguments: Any = "", index: Any = 0, call_id: Any = None, name: Any = None) -> Any:
    given = {"index": index, "id": call_id}
    function = {"name": name, "arguments": arguments}
    return {
        **{key: value for key, value in given.items() if value is not _ABSENT},
        "function": {key: value for key, value in function.items() if value is not None},
    }


def written(*pieces: Any) -> list[Any]:
    text = CallText()
    whole = "".join(text.push([one]) for one in pieces) + text.close()
    found = re.findall("<tool_call>(.*?)</tool_call>", whole)
    assert "".join(f"<tool_call>{one}</tool_call>" for one in found) == whole
    return [(one["name"], one["arguments"].get("city")) for one in map(json.loads, found)]


BOTH = [("f", "Oslo"), ("f", "Rome")]
SAME_INDEX = {
    "new ids": [piece(OSLO, call_id="a", name="f"), piece(ROME, call_id="b", name="f")],
    "new names": [piece(OSLO, name="f"), piece(ROME, name="g")],
    "the same name again": [piece(OSLO, name="f"), piece(ROME, name="f")],
    "no index, ids": [piece(OSLO, None, "a", "f"), piece(ROME, None, "b", "f")],
    "no index key, ids": [piece(OSLO, _ABSENT, "a", "f"), piece(ROME, _ABSENT, "b", "f")],
    "no index, no ids": [piece(OSLO, None, name="f"), piece(ROME, None, name="f")],
    "arguments behind the head": [
        piece(call_id="a", name="f"),
        piece(OSLO[:5]),
        piece(OSLO[5:]),
        piece(call_id="b", name="f"),
        piece(ROME),
    ],
    "interleaved by id": [
        piece(OSLO[:5], call_id="a", name="f"),
        piece(ROME[:5], call_id="b", name="f"),
        piece(OSLO[5:], call_id="a"),
        piece(ROME[5:], call_id="b"),
    ],
    "interleaved by index": [
        piece(call_id="a", name="f"),
        piece(index=1, call_id="b", name="f"),
        piece(ROME[:5], index=1),
        piece(OSLO),
        piece(ROME[5:], index=1),
    ],
    "one id for all": [piece(OSLO, 0, "a", "f"), piece(ROME, 1, "a", "f"), piece(" ", 0, "a")],
    "an id in each piece": [
        piece(OSLO[:5], 0, "a", "f"),
        piece(OSLO[5:], 0, "b", "f"),
        piece(ROME[:5], 1, "c", "f"),
        piece(ROME[5:], 1, "d"),
    ],
    "head repeated": [
        piece(OSLO[:5], 0, "a", "f"),
        piece(OSLO[5:], 0, "a", "f"),
        piece("", 0, "a", "f"),
        piece(ROME, 1, "b", "f"),
    ],
    "arguments as objects": [
        piece({"city": "Oslo"}, call_id="a", name="f"),
        piece({"city": "Rome"}, call_id="b", name="f"),
    ],
    "all in one piece": [piece(OSLO, 0, "a", "f"), piece(ROME, 0, "b", "f")],
}


@pytest.mark.parametrize("kind", SAME_INDEX)
def test_pieces_become_the_calls_they_belong_to(kind: str) -> None:
    expected = [("f", "Oslo"), ("g", "Rome")] if kind == "new names" else BOTH
    assert written(*SAME_INDEX[kind]) == expected
    together = CallText()
    text = together.push(SAME_INDEX[kind]) + together.close()
    assert text.count("<tool_call>") == 2


def test_calls_are_written_as_text() -> None:
    text, pieces = CallText(), [call_piece(one)["delta"]["tool_calls"] for one in CALL_PIECES]
    whole = "".join(map(text.push, pieces)) + text.close()
    assert re.findall("<tool_call>(.*?)</tool_call>", whole) == [
        '{"name": "look_up", "arguments": {"city": "Köln"}}',
        '{"name": "look_up", "arguments": {"city": "Rome"}}',
        '{"name": "now", "arguments": {}}',
    ]
    assert text.close() == ""


def test_a_call_is_written_when_another_begins() -> None:
    text = CallText()
    assert text.push([piece(OSLO, call_id="a", name="f")]) == ""
    assert "Oslo" in text.push([piece("", call_id="b", name="f")])
    assert text.push([piece(ROME)]) == ""
    assert "Rome" in text.close()


@pytest.mark.parametrize("arguments", ["", None, "null", '""', " "])
def test_no_arguments_are_an_empty_object(arguments: str | None) -> None:
    assert written(piece(arguments, name="now"), piece(OSLO, 1, name="f")) == [
        ("now", None),
        ("f", "Oslo"),
    ]


def test_broken_pieces_are_faults() -> None:
    with pytest.raises(ServerFault, match="without a name"):
        CallText().push([piece(OSLO)])
    late = [piece(OSLO, 0, "a", "f"), piece("", 1, "b", "f"), piece(ROME, 0, "a")]
    with pytest.raises(ServerFault, match="that was complete"):
        CallText().push(late)
    with pytest.raises(ServerFault, match="over 2048 tool calls"):
        CallText().push([piece("", at, name="f") for at in range(CALLS_MAX + 1)])
    with pytest.raises(ServerFault, match="without an end"):
        CallText().push([piece("x" * CALLS_CHARS_MAX, name="f"), piece("x")])
