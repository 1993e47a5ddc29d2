"""A real gateway before a real nats-server; the test plays the batcher."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from gateway.config.models import load_catalog
from gateway.models.catalog import Catalog
from tests.gateway.kit.tokenizer import write_model
from tests.gateway.kit.wire import Opened, Wire, open_wire, settings_for


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def catalog(model_folder: Path) -> Catalog:
    return load_catalog(settings_for(model_folder))


@pytest.fixture
def opened(nats_url: str, model_folder: Path) -> Opened:
    """Opens gateways with the options of `open_wire`."""
    return partial(open_wire, nats_url, model_folder)


@pytest.fixture
async def wire(request: pytest.FixtureRequest, opened: Opened) -> AsyncIterator[Wire]:
    """A gateway with the options of the test's marker `wire`."""
    marker = request.node.get_closest_marker("wire")
    async with opened(**(marker.kwargs if marker else {})) as opened_wire:
        yield opened_wire
