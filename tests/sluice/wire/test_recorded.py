"""Processes of this release and of the one before read each other's messages, so they can be rolled one by one."""

import pytest
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from batcher.core.row import checked_task
from sluice.internal.v1.control_pb2 import BatcherReport
from sluice.internal.v1.task_pb2 import Task
from sluice.wire import subjects
from sluice.wire.codec import pack, read_report, unpack
from tests.sluice.wire.recorded import kinds, recorded, samples

WRITTEN, EARLIER = recorded()
NOW = kinds()


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_what_the_release_before_wrote_is_read_whole(name: str) -> None:
    assert name in NOW, "the release before sends it"
    for payload, was in zip(WRITTEN[name], samples(EARLIER[name]), strict=True):
        read = unpack(NOW[name], payload)
        assert not len(UnknownFieldSet(read)), "a field was removed"
        assert as_read_by(EARLIER[name], read) == was


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_the_release_before_reads_what_is_written_now(name: str) -> None:
    earlier = EARLIER[name]
    for is_now, was in zip(samples(NOW[name]), samples(earlier), strict=False):
        assert as_read_by(earlier, is_now) == was


def as_read_by(kind: type[Message], message: Message) -> Message:
    read = kind.FromString(pack(message))
    read.DiscardUnknownFields()
    return read


def test_fields_of_a_later_release_pass_the_checks_of_this_one() -> None:
    """Unknown to it: field 1000, a string."""
    later = b"\xc2\x3e\x05later"
    task = Task(request_id="r", gateway="g", model="small", prompt_token_ids=[1], timeout_ms=1)
    task.priority_class, task.sampling.max_tokens = "interactive", 1
    task.sampling.top_p = task.sampling.repetition_penalty = 1
    assert checked_task(task.SerializeToString() + later).prompt_token_ids == [1]
    report = BatcherReport(batcher="b", sequence=1)
    read = read_report(subjects.report("b"), report.SerializeToString() + later)
    assert read.sequence == 1
