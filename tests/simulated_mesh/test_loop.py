"""How processes of a simulated mesh end, and their subscriptions."""

import asyncio
from random import Random

from nats.aio.msg import Msg

from tests.simulated_mesh.loop import SimulatedProcess, virtual_time
from tests.simulated_mesh.nats import Connection, NatsServer


def test_a_task_that_had_not_begun_when_its_process_crashed_ends() -> None:
    with virtual_time() as loop:
        process = SimulatedProcess(loop, "killed")
        task = process.spawn(asyncio.sleep(1))
        process.crash()
        loop.run_until_complete(asyncio.sleep(1))
        assert not task.done()
    assert task.cancelled()
    assert not loop.faults


def test_what_has_come_is_discarded_by_the_end_of_a_subscription() -> None:
    """As nats-py does: callbacks of what has ended are not called."""
    heard = []

    async def hear(message: Msg) -> None:
        heard.append(message.data)

    async def ends() -> None:
        subscription = await connection.subscribe("word", cb=hear)
        await connection.publish("word", b"one")
        await connection.flush()
        await connection.publish("word", b"two")
        await subscription.unsubscribe()

    with virtual_time() as loop:
        server = NatsServer(loop, Random(1))
        connection = Connection(server, SimulatedProcess(loop, "one"))
        loop.run_until_complete(connection.process.spawn(ends()))
        loop.run_until_complete(asyncio.sleep(1))
    assert heard == [b"one"]
