"""Items of an input on their way to the gateways."""

from collections.abc import Iterator

import pytest

from jobs.core.window import Entry
from jobs.items import Item
from jobs.sources import WHOLE_S, Blocks, defaults_of, entry_of
from sluice.errors import InputInvalid
from sluice.openai.requests import request_of_plain
from sluice.v1.inference_pb2 import PRIORITY_BULK
from sluice.v1.jobs_pb2 import Job, JobSpec


def test_an_item_is_bulk_and_its_answer_comes_as_a_whole() -> None:
    spec = JobSpec(model="small")
    item = Item("item-1", 1, request_of_plain({"prompt": "hello"}, defaults_of(spec)))
    request = entry_of(Job(id="job", spec=spec), 0, item).request
    assert request.priority == PRIORITY_BULK
    assert request.gather.seconds == WHOLE_S


def test_a_block_ends_by_its_bytes() -> None:
    spec = JobSpec(model="small")
    item = Item("item-1", 1, request_of_plain({"prompt": "x" * 1_000_000}, defaults_of(spec)))
    blocks = Blocks(entry_of(Job(id="job", spec=spec), place, item) for place in range(12))

    assert [len(blocks.next()) for _ in range(4)] == [5, 5, 2, 0]


def test_error_comes_behind_the_items_before_it() -> None:
    def entries() -> Iterator[Entry]:
        item = Item("item-1", 1, request_of_plain({"prompt": "x"}, defaults_of(JobSpec())))
        yield entry_of(Job(id="job"), 0, item)
        raise InputInvalid("damaged")

    blocks = Blocks(entries())
    assert len(blocks.next()) == 1
    for _ in range(2):
        with pytest.raises(InputInvalid):
            blocks.next()
