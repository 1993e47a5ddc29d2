"""A gateway that serves HTTP; the test plays the batcher."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.gateway.kit.wire import Wire, open_wire


@pytest.fixture
async def http(nats_url: str, model_folder: Path) -> AsyncIterator[Wire]:
    async with open_wire(nats_url, model_folder, http="127.0.0.1:0") as opened:
        yield opened


@pytest.fixture
async def openai(http: Wire) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client as it is; no retries, so that errors show."""
    url = f"http://{http.http}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client
