"""Messages that wait together travel as one, whole and in order."""

import asyncio
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from sluice.internal.v1.items_pb2 import RunResponse
from sluice.wire.groups import GROUP_BYTES_MAX, GroupWriter, next_group

BOUND_S = 60.0


def one(number: int, size: int = 0) -> RunResponse:
    return RunResponse(id=number, error=bytes(size))


@given(st.lists(st.sampled_from((0, 100, GROUP_BYTES_MAX // 3, 2 * GROUP_BYTES_MAX)), max_size=12))
def test_groups_have_all_in_order_and_are_bounded(sizes: list[int]) -> None:
    waiting = deque(one(number, size) for number, size in enumerate(sizes, 1))
    seen = list[int]()
    while waiting:
        left, group = len(waiting), next_group(waiting)
        assert len(waiting) == left - 1 - len(group.more)
        if group.more:
            assert sum(each.ByteSize() for each in (*group.more, one(1))) <= GROUP_BYTES_MAX
            assert len(group.error) <= GROUP_BYTES_MAX
        elif waiting:
            assert group.ByteSize() + waiting[0].ByteSize() > GROUP_BYTES_MAX, "it had room"
        seen += (each.id for each in (group, *group.more))
    assert seen == list(range(1, len(sizes) + 1))


async def test_messages_made_during_a_write_go_together() -> None:
    groups, begun, free = list[list[int]](), asyncio.Event(), asyncio.Event()

    async def write(group: RunResponse) -> None:
        groups.append([each.id for each in (group, *group.more)])
        begun.set()
        await free.wait()

    writer = GroupWriter(write)
    async with asyncio.timeout(BOUND_S), asyncio.TaskGroup() as tasks:
        for number in (1, 2):
            tasks.create_task(writer.write(one(number)))
        await begun.wait()
        for number in (3, 4):
            tasks.create_task(writer.write(one(number)))
        await asyncio.sleep(0)
        free.set()
    assert groups == [[1, 2], [3, 4]]
