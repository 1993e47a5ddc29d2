"""Refusals because of a deadline, with a real worker of two slots whose steps take 10 ms."""

import asyncio
from typing import Any, Final

import httpx
import pytest

from bench.support.meshes import echo
from sluice.settings import HttpSettings
from supervisor.mesh import running_mesh
from tests.support.mesh import quick_settings

pytestmark = [pytest.mark.mesh, pytest.mark.long]

SLOTS: Final = 2
STEP_S: Final = 0.01
LONG: Final = 60
"""Tokens of a long answer, which takes 0.6 s."""
BOUND_S: Final = 60.0
SETTINGS: Final = quick_settings(
    echo(SLOTS, echo_step_ms=1000 * STEP_S), http=HttpSettings(address="127.0.0.1:0")
)

Answer = tuple[int, dict[str, Any], float]
"""Status, error (empty: none) and the seconds after which a retry is offered."""


async def ask(
    client: httpx.AsyncClient, tokens: int, timeout_s: float = 60.0, tenant: str = "others"
) -> Answer:
    """An answer of exactly so many tokens."""
    reply = await client.post(
        "/v1/chat/completions",
        json={
            "model": "echo",
            "messages": [{"role": "user", "content": "Write"}],
            "max_tokens": tokens,
            "min_tokens": tokens,
        },
        headers={"x-sluice-timeout": str(timeout_s), "sluice-tenant": tenant},
    )
    retry_s = float(reply.headers.get("retry-after-ms", 0)) / 1000
    return reply.status_code, reply.json().get("error", {}), retry_s


async def test_only_work_before_a_request_refuses_it() -> None:
    async with (
        running_mesh(SETTINGS) as mesh,
        httpx.AsyncClient(base_url=f"http://{mesh.http}", timeout=60.0) as client,
    ):
        answers: list[Answer] = []
        # What was asked before refuses nothing on an idle model: neither long answers of others
        # nor short ones that waited behind them.
        for _ in range(2):
            answers += await asyncio.gather(
                *(ask(client, LONG) for _ in range(SLOTS + 1)), ask(client, 1)
            )
        for _ in range(10):
            answers.append(await ask(client, 2, LONG * STEP_S / 2, "short"))
        answers += await asyncio.gather(*(ask(client, 20, 5.0, "short") for _ in range(SLOTS)))
        # What stands before it does.
        running = [asyncio.create_task(ask(client, LONG)) for _ in range(4 * SLOTS)]
        status = 0
        async with asyncio.timeout(BOUND_S):
            while status != 429:
                status, error, retry_s = await ask(client, 2, 0.4)
        assert (error["code"], error["type"]) == ("expected_late", "overloaded_error")
        assert error["message"].startswith("deadline: 0.4 s left, about ")
        assert " tokens/s); retry in " in error["message"]
        assert 0 < retry_s < 60
        answers += await asyncio.gather(*running)
        answers.append(await ask(client, 2, LONG * STEP_S / 2))
        assert {status for status, *_ in answers} == {200}
