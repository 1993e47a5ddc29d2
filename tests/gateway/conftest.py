"""A real gateway before a real nats-server; the test plays the batcher."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.config.models import load_catalog
from gateway.models.catalog import Catalog
from tests.gateway.kit.tokenizer import write_model
from tests.gateway.kit.wire import Wire, open_wire, settings_for


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def catalog(model_folder: Path) -> Catalog:
    return load_catalog(settings_for(model_folder))


@pytest.fixture
async def wire(nats_url: str, model_folder: Path) -> AsyncIterator[Wire]:
    async with open_wire(nats_url, model_folder) as opened:
        yield opened
