"""Messages of Anthropic's API, whole and as events: both are the same, however the answer was cut into pieces."""

import json
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.message_events import MessageEvents
from sluice.v1 import inference_pb2 as pb

ROUTE: Final = pb.Route(degraded=True)
STARTED: Final = pb.Started(request_id="req-1", model="small", prompt_tokens=20, route=ROUTE)
texts = st.text(max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
calls = st.builds(
    pb.ToolCall,
    id=st.sampled_from(["call_1", "call_2"]),
    name=st.just("weather"),
    arguments=st.dictionaries(texts, values, max_size=2).map(json.dumps) | st.just(""),
)
deltas = st.builds(
    pb.Delta,
    text=texts,
    reasoning=texts,
    tool_calls=st.lists(calls, max_size=2),
    token_ids=st.just([1]),
)
ends = st.builds(
    pb.Finished,
    reason=st.sampled_from(pb.FinishReason.values()[1:]),
    stop=st.sampled_from(["", "END"]),
    usage=st.builds(
        pb.Usage,
        prompt_tokens=st.just(20),
        completion_tokens=st.integers(0, 9),
        cached_prompt_tokens=st.sampled_from([0, 16]),
    ),
    model=st.just("small"),
    rules=st.lists(st.just("canary"), max_size=1),
)


def responses_of(pieces: list[pb.Delta], end: pb.Finished) -> list[pb.GenerateResponse]:
    """As the gateway may send them: the start with the first piece, the last piece with the end."""
    responses = [pb.GenerateResponse(delta=piece) for piece in pieces] or [pb.GenerateResponse()]
    responses[0].started.CopyFrom(STARTED)
    responses[-1].finished.CopyFrom(end)
    return responses


def sent(responses: list[pb.GenerateResponse], *, streams: bool, caches: bool = True) -> bytes:
    events = MessageEvents(8, streams=streams, caches=caches)
    return b"".join(map(events.take, responses)) + events.end()


def joined(stream: bytes) -> dict[str, Any]:
    """Return the message of a stream, as Anthropic's documents say that clients make it."""
    message: dict[str, Any] = {}
    jsons: list[str] = []
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        match event:
            case {"type": "message_start", "message": start}:
                message = {**start}
            case {"type": "content_block_start", "index": index, "content_block": begun}:
                assert index == len(message["content"])
                message["content"].append(begun)
                jsons.append("")
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert index == len(message["content"]) - 1
                kind = delta["type"].removesuffix("_delta")
                if kind == "input_json":
                    jsons[index] += delta["partial_json"]
                else:
                    message["content"][index][kind] += delta[kind]
            case {"type": "content_block_stop", "index": index}:
                if jsons[index]:
                    message["content"][index]["input"] = json.loads(jsons[index])
            case {"type": "message_delta", "delta": ended, "usage": usage}:
                message |= {**ended, "usage": message["usage"] | usage}
    assert stream.endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
    return message


@given(st.lists(deltas, max_size=5), ends)
def test_stream_adds_up_to_the_whole(pieces: list[pb.Delta], end: pb.Finished) -> None:
    responses = responses_of(pieces, end)
    whole = json.loads(sent(responses, streams=False))
    assert joined(sent(responses, streams=True)) == whole
    blocks = whole["content"]
    for kind, field in (("text", "text"), ("thinking", "reasoning")):
        shown = "".join(block[kind] for block in blocks if block["type"] == kind)
        assert shown == "".join(getattr(piece, field) for piece in pieces)
    made = [json.loads(call.arguments or "{}") for piece in pieces for call in piece.tool_calls]
    assert [block["input"] for block in blocks if block["type"] == "tool_use"] == made


@given(st.lists(deltas, max_size=5), ends, st.data())
def test_blocks_do_not_depend_on_the_pieces(
    pieces: list[pb.Delta], end: pb.Finished, data: st.DataObject
) -> None:
    cut: list[pb.Delta] = []
    for piece in pieces:
        at = data.draw(st.integers(0, len(piece.text)))
        cut += [
            pb.Delta(reasoning=piece.reasoning, text=piece.text[:at]),
            pb.Delta(text=piece.text[at:], tool_calls=piece.tool_calls),
        ]
    assert joined(sent(responses_of(cut, end), streams=True)) == joined(
        sent(responses_of(pieces, end), streams=True)
    )


@pytest.mark.parametrize(
    ("reason", "tokens", "said"),
    [
        (pb.FINISH_REASON_STOP, 3, "end_turn"),
        (pb.FINISH_REASON_STOP_SEQUENCE, 3, "stop_sequence"),
        (pb.FINISH_REASON_TOOL_CALLS, 3, "tool_use"),
        (pb.FINISH_REASON_CONTENT_FILTER, 3, "refusal"),
        (pb.FINISH_REASON_LENGTH, 8, "max_tokens"),
        (pb.FINISH_REASON_LENGTH, 3, "model_context_window_exceeded"),
    ],
)
def test_reason_of_an_end(reason: pb.FinishReason.ValueType, tokens: int, said: str) -> None:
    end = pb.Finished(reason=reason, usage=pb.Usage(completion_tokens=tokens))
    message = json.loads(sent(responses_of([], end), streams=False))
    assert (message["stop_reason"], message["content"]) == (said, [])
    assert (message["id"], message["degraded"]) == ("msg_req-1", True)


@pytest.mark.parametrize(("caches", "counts"), [(True, (4, 16)), (False, (20, 0))])
def test_cached_tokens_count_apart_for_who_asks(caches: bool, counts: tuple[int, int]) -> None:
    usage = pb.Usage(prompt_tokens=20, cached_prompt_tokens=16, completion_tokens=2)
    responses = responses_of([], pb.Finished(usage=usage))
    found = json.loads(sent(responses, streams=False, caches=caches))["usage"]
    assert (found["input_tokens"], found["cache_read_input_tokens"]) == counts
    assert (found["cache_creation_input_tokens"], found["output_tokens"]) == (0, 2)
