"""The batcher between a real nats-server and a real Triton; the test plays the gateway."""

from sluice.internal.v1 import frame_pb2
from tests.batcher.batchers import ECHO, running_batcher, settings_of
from tests.batcher.gateway_double import ACK, GatewayDouble, echo_of
from tests.support.triton import RunningTriton


async def test_tasks_are_answered_in_full_and_leave_the_work_queue(
    nats_url: str, gateway: GatewayDouble, echo_triton: RunningTriton
) -> None:
    async with running_batcher(settings_of(nats_url, echo_triton.address, ECHO)):
        tasks = [
            await gateway.ask(prompt=(n, n + 1, n + 2), max_tokens=20, priority_class=name)
            for n, name in enumerate(("interactive", "standard", "bulk") * 8)
        ]
        for task in tasks:
            answer = await gateway.finished(task)
            assert answer.token_ids == echo_of(task)
            assert answer.final is not None
            assert answer.final.end == frame_pb2.ROW_END_LENGTH
            assert await gateway.settled(task) == ACK
        assert await gateway.tasks_left() == 0
    assert gateway.reports[-1].leaving
