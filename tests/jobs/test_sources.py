"""Items of an input on their way to the gateways."""

from collections.abc import Iterator

import pytest

from jobs.items import Item
from jobs.sources import WHOLE_S, blocks_of, defaults_of, place_item
from sluice.errors import InputInvalid
from sluice.openai.requests import request_of_plain
from sluice.v1.inference_pb2 import PRIORITY_BULK
from sluice.v1.jobs_pb2 import Job, JobSpec


def test_an_item_is_bulk_and_its_answer_comes_as_a_whole() -> None:
    spec = JobSpec(model="small")
    item = Item("item-1", 1, request_of_plain({"prompt": "hello"}, defaults_of(spec)))
    request = place_item(Job(id="job", spec=spec), 0, item).request
    assert request.priority == PRIORITY_BULK
    assert request.gather.seconds == WHOLE_S


def test_a_block_ends_by_its_bytes() -> None:
    spec = JobSpec(model="small")
    item = Item("item-1", 1, request_of_plain({"prompt": "x" * 1_000_000}, defaults_of(spec)))
    blocks = blocks_of(place_item(Job(id="job", spec=spec), at, item) for at in range(12))

    assert [len(block) for block in blocks] == [5, 5, 2]


def test_error_comes_behind_the_items_before_it() -> None:
    def entries() -> Iterator[Item]:
        item = Item("item-1", 1, request_of_plain({"prompt": "x"}, defaults_of(JobSpec())))
        yield place_item(Job(id="job"), 0, item)
        raise InputInvalid("damaged")

    blocks = blocks_of(entries())
    assert len(next(blocks)) == 1
    with pytest.raises(InputInvalid):
        next(blocks)
