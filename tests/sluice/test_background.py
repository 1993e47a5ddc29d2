import asyncio

from sluice.background import BackgroundTasks

BOUND_S = 60.0


async def test_a_task_is_kept_until_it_ends():
    tasks, gate = BackgroundTasks(), asyncio.Event()

    async def work() -> None:
        await gate.wait()

    tasks.spawn(work())
    assert len(tasks) == 1
    await tasks.settle(0.0)
    assert len(tasks) == 1
    gate.set()
    await tasks.settle(BOUND_S)
    assert len(tasks) == 0
    await tasks.settle(BOUND_S)


async def test_closing_cancels_what_runs_and_waits_for_its_end():
    tasks, ended = BackgroundTasks(), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    tasks.spawn(work())
    await asyncio.sleep(0)
    await tasks.close()
    assert ended == [True]
    assert len(tasks) == 0


async def test_a_fault_is_told_and_a_cancelled_task_is_none():
    faults: list[Exception] = []
    tasks = BackgroundTasks(faults.append)

    async def fail() -> None:
        raise ValueError("no")

    async def stay() -> None:
        await asyncio.Event().wait()

    tasks.spawn(fail())
    tasks.spawn(stay())
    await asyncio.sleep(0)
    await tasks.close()
    assert [type(fault) for fault in faults] == [ValueError]


async def test_without_a_listener_asyncio_tells_of_a_fault():
    told: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    tasks = BackgroundTasks()

    async def fail() -> None:
        raise ValueError("no")

    tasks.spawn(fail())
    await tasks.settle(BOUND_S)
    del tasks
    await asyncio.sleep(0)
    assert isinstance(told[0]["exception"], ValueError)
