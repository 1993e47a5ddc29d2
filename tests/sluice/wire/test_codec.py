"""Messages survive packing; what is not a message is told apart."""

import contextlib

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.internal.v1 import control_pb2, frame_pb2, task_pb2
from sluice.wire import codec
from sluice.wire.clock import duration

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=200)


@given(prompt=token_ids, produced=token_ids)
def test_a_task_survives(prompt: list[int], produced: list[int]) -> None:
    task = task_pb2.Task(request_id="req-1", prompt_token_ids=prompt, produced_token_ids=produced)
    assert codec.unpack(task_pb2.Task, codec.pack(task)) == task


def test_a_long_task_that_is_kept_takes_5_bytes_a_token() -> None:
    tokens, count = 8000, 500
    payload = codec.pack(task_pb2.Task(prompt_token_ids=range(tokens)))
    before = psutil.Process().memory_full_info().uss
    kept = [codec.unpack_to_keep(task_pb2.Task, payload) for _ in range(count)]
    grown = psutil.Process().memory_full_info().uss - before
    assert grown < 5 * tokens * count
    assert list(kept[-1].prompt_token_ids) == list(range(tokens))


def test_a_message_over_the_limit_is_told_with_both_numbers() -> None:
    task = task_pb2.Task(prompt_token_ids=[300] * 1000)
    with pytest.raises(codec.OversizedMessage) as caught:
        codec.pack(task, limit=1024)
    assert caught.value.size == task.ByteSize()
    assert caught.value.limit == 1024


@given(junk=st.binary(min_size=1, max_size=64))
def test_junk_raises_nothing_but_malformed(junk: bytes) -> None:
    with contextlib.suppress(codec.MalformedMessage):
        assert isinstance(codec.unpack(frame_pb2.FrameBundle, junk), frame_pb2.FrameBundle)


def test_a_truncated_message_is_malformed() -> None:
    whole = codec.pack(task_pb2.Task(request_id="req-1", model="small"))
    with pytest.raises(codec.MalformedMessage):
        codec.unpack(task_pb2.Task, whole[:-1])


@pytest.mark.parametrize("sender", ["", "a b", "a.b", "*", "x\r\nPUB y 0", "é", "a" * 65])
def test_whoever_could_not_be_answered_is_no_sender(sender: str) -> None:
    with pytest.raises(codec.MalformedMessage, match="batcher"):
        codec.read_bundle(frame_pb2.FrameBundle(batcher=sender).SerializeToString())
    with pytest.raises(codec.MalformedMessage, match="gateway"):
        codec.read_control(control_pb2.ControlMessage(gateway=sender).SerializeToString())


@pytest.mark.parametrize("ms", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_time_that_cannot_be_is_none(ms: float) -> None:
    assert not duration(ms).ToNanoseconds()


def test_bundle_of_too_many_frames_is_malformed() -> None:
    frames = [frame_pb2.Frame()] * (codec.BUNDLE_FRAMES_MAX + 1)
    bundle = frame_pb2.FrameBundle(batcher="b", frames=frames)
    with pytest.raises(codec.MalformedMessage, match="8193 entries, the limit is 8192"):
        codec.read_bundle(bundle.SerializeToString())
