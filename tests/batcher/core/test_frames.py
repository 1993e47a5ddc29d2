import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.core.frames import BUNDLE_BYTES_MAX, merge, pack_bundles, part_of, resend
from batcher.core.queued_request import QueuedRequest
from batcher.core.workers import ChannelBroken
from sluice.internal.v1 import frame_pb2, task_pb2
from sluice.wire.codec import BUNDLE_FRAMES_MAX, MAX_MESSAGE_BYTES, read_bundle


def row_of(produced: int = 0, base: int = 0, logprobs: bool = False) -> QueuedRequest:
    """A row with tokens 0, 1, 2, ...; the first ``base`` of them came with the task."""
    task = task_pb2.Task(request_id="r", gateway="g", produced_token_ids=range(base))
    row = QueuedRequest(task, now=0.0)
    new = range(base, produced)
    row.produced.extend(new)
    row.logprobs += [frame_pb2.Logprobs(logprob=-float(n)) for n in new if logprobs]
    return row


def frame_of(start: int, count: int, *, final: bool = False, attempt: int = 0) -> frame_pb2.Frame:
    frame = frame_pb2.Frame(
        request_id="r", attempt=attempt, start_index=start, token_ids=range(start, start + count)
    )
    if final:
        frame.final.end = frame_pb2.TASK_END_STOP
    return frame


@pytest.mark.parametrize("frame", [frame_of(3, 2), frame_of(0, 0)])
def test_frame_with_known_tokens_alone_is_nothing_new(frame: frame_pb2.Frame) -> None:
    assert merge(row_of(5), frame) is None


@pytest.mark.parametrize("frame", [frame_of(6, 1), frame_of(6, 0, final=True)])
def test_frame_after_missing_tokens_breaks_the_channel(frame: frame_pb2.Frame) -> None:
    with pytest.raises(ChannelBroken):
        merge(row_of(5), frame)


def test_the_tokens_of_a_final_frame_can_go_alone() -> None:
    alone = part_of(frame_of(5, 2, final=True), final=False)
    assert (list(alone.token_ids), alone.HasField("final")) == ([5, 6], False)


@given(known=st.integers(0, 20), start=st.integers(0, 20), count=st.integers(0, 20))
def test_merging_loses_the_known_head_and_nothing_else(known: int, start: int, count: int) -> None:
    row, frame = row_of(known), frame_of(min(start, known), count, final=True)
    rest = merge(row, frame)
    assert rest is not None
    assert row.produced == list(range(max(known, frame.start_index + count)))
    assert rest.start_index == known
    assert list(rest.token_ids) == row.produced[known:]
    assert rest.HasField("final")


def test_logprobs_lose_the_same_head_as_tokens() -> None:
    row = row_of(2, logprobs=True)
    frame = frame_of(1, 3)
    frame.logprobs.extend(frame_pb2.Logprobs(logprob=-float(n)) for n in range(1, 4))
    rest = merge(row, frame)
    assert rest is not None
    assert [entry.logprob for entry in rest.logprobs] == [-2.0, -3.0]
    assert [entry.logprob for entry in row.logprobs] == [0.0, -1.0, -2.0, -3.0]


@given(
    produced=st.integers(0, 20),
    base=st.integers(0, 20),
    from_index=st.integers(0, 25),
    tokens_max=st.integers(1, 9),
    ended=st.booleans(),
)
def test_resend_has_what_the_gateway_misses_in_pieces(
    produced: int, base: int, from_index: int, tokens_max: int, ended: bool
) -> None:
    base = min(base, produced)
    row = row_of(produced, base, logprobs=True)
    row.final = frame_pb2.Final(end=frame_pb2.TASK_END_STOP) if ended else None
    pieces = resend(row, from_index, tokens_max)
    missing = list(range(max(from_index, base), produced))
    assert [token for piece in pieces for token in piece.token_ids] == missing
    logprobs = [-entry.logprob for piece in pieces for entry in piece.logprobs]
    assert logprobs == missing, "those of the tokens"
    assert all(piece.start_index == piece.token_ids[0] for piece in pieces if piece.token_ids)
    assert all(len(piece.token_ids) <= tokens_max for piece in pieces)
    assert [piece.HasField("final") for piece in pieces] == [
        *[False] * -(-len(missing) // tokens_max),
        *[True] * ended,
    ]
    assert not ended or pieces[-1].start_index == produced


def test_acknowledgements_fill_as_many_messages_as_needed() -> None:
    held = [frame_pb2.TaskRef(request_id=f"request-{n:032}") for n in range(40_000)]
    packed = list(pack_bundles("b", [frame_of(0, 1)], held))
    assert sorted(ref.request_id for one in packed for ref in one.pending) == sorted(
        ref.request_id for ref in held
    )
    assert sum(len(one.frames) for one in packed) == 1
    assert all(one.ByteSize() <= MAX_MESSAGE_BYTES for one in packed)


def test_a_frame_that_is_too_large_goes_alone() -> None:
    large = frame_pb2.Frame(request_id="r", token_ids=[2**31] * BUNDLE_BYTES_MAX)
    held = [frame_pb2.TaskRef(request_id="held")]
    assert [(len(one.frames), len(one.pending)) for one in pack_bundles("b", [large], held)] == [
        (1, 0),
        (0, 1),
    ]


@settings(max_examples=25)
@given(st.lists(st.integers(0, 150_000), max_size=12))
def test_bundles_keep_all_frames_in_order_below_the_limit(counts: list[int]) -> None:
    sent = [
        frame_pb2.Frame(request_id="r", start_index=n, token_ids=[2**31] * count)
        for n, count in enumerate(counts)
    ]
    packed = list(pack_bundles("b", sent, []))
    assert [frame for bundle in packed for frame in bundle.frames] == sent
    assert all(bundle.ByteSize() <= MAX_MESSAGE_BYTES for bundle in packed)
    size = sum(frame.ByteSize() for frame in sent)
    assert len(packed) <= max(1, 4 * size // BUNDLE_BYTES_MAX)


def test_bundles_have_no_more_frames_than_a_gateway_takes() -> None:
    sent = [frame_pb2.Frame(start_index=number) for number in range(2 * BUNDLE_FRAMES_MAX + 1)]
    held = [frame_pb2.TaskRef(attempt=number) for number in range(BUNDLE_FRAMES_MAX + 1)]
    packed = [read_bundle(one.SerializeToString()) for one in pack_bundles("b", sent, held)]
    assert [one.start_index for bundle in packed for one in bundle.frames] == [*range(len(sent))]
    assert [one.attempt for bundle in packed for one in bundle.pending] == [*range(len(held))]
