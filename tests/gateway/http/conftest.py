"""A gateway that serves HTTP; the test plays the batcher."""

import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from tests.gateway.kit.wire import Wire, open_wire


@pytest.fixture
async def http(nats_url: str, model_folder: Path) -> AsyncIterator[Wire]:
    async with open_wire(nats_url, model_folder, http="127.0.0.1:0") as opened:
        yield opened


@pytest.fixture(scope="session")
def authorities() -> ssl.SSLContext:
    """Made once: reading a hundred certificates for each client took longer than most tests."""
    return ssl.create_default_context()


@pytest.fixture
async def openai(http: Wire, authorities: ssl.SSLContext) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client as it is; no retries, so that errors show."""
    http_client = DefaultAsyncHttpxClient(verify=authorities)
    async with AsyncOpenAI(
        base_url=f"http://{http.http}/v1",
        api_key="none",
        max_retries=0,
        timeout=60,
        http_client=http_client,
    ) as client:
        yield client
