"""Nothing of a request stays behind, however it ends."""

import gc
from collections import Counter

from gateway.admission.request_context import PreparedPrompt
from tests.gateway.kit.wire import Wire, error_of, prompt


async def requests(wire: Wire, count: int) -> None:
    """Of each kind: answered, left by its caller, refused."""
    for _ in range(count):
        call, task = await wire.begin(prompt())
        await wire.end(call, task, "hello")
        call, task = await wire.begin(prompt())
        call.cancel()
        await wire.batcher.cancelled(task)
        await error_of(wire.stub.Generate(prompt("hello " * 500)))
        wire.batcher.control.clear()


async def kept(wire: Wire) -> Counter[str]:
    """Objects of the gateway's own classes, by class."""
    await wire.until(lambda: len(wire.gateway.registry) == 0 and wire.gateway.active == 0)
    await wire.gateway.store.flush(60.0)
    wire.spans.clear()
    gc.collect()
    kinds = (type(one) for one in gc.get_objects())
    return Counter(
        kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("gateway.")
    )


async def test_requests_leave_no_objects_behind(wire: Wire) -> None:
    await requests(wire, 3)
    before = await kept(wire)
    await requests(wire, 30)
    grown = await kept(wire) - before
    assert not {kind: count for kind, count in grown.items() if count >= 10}


async def test_a_request_that_waits_keeps_its_task_alone(wire: Wire) -> None:
    call, task = await wire.begin(prompt("hello " * 20))
    assert not [one for one in gc.get_objects() if isinstance(one, PreparedPrompt)]
    tokens = list(task.prompt_token_ids)
    lists = (one for one in gc.get_objects() if type(one) is list and one is not tokens)
    assert not [one for one in lists if one == tokens]
    await wire.end(call, task, "hello")
