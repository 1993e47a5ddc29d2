"""A real gateway before a real nats-server; the test plays the batcher."""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from gateway.config.models import load_catalog
from gateway.models.catalog import Catalog
from sluice.settings import ModelSettings
from tests.gateway.kit.secured import Secured, secured
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


@pytest.fixture(scope="module")
def more_models() -> Sequence[ModelSettings]:
    """Models of the gateway beside "small" and "large"."""
    return ()


@pytest.fixture
async def wire(
    request: pytest.FixtureRequest, opened: Opened, more_models: Sequence[ModelSettings]
) -> AsyncIterator[Wire]:
    """A gateway with the options of the test's marker `wire`."""
    marker = request.node.get_closest_marker("wire")
    options = marker.kwargs if marker else {}
    async with opened(more_models=more_models, **options) as opened_wire:
        yield opened_wire


@pytest.fixture
async def mesh(
    request: pytest.FixtureRequest, nats_url: str, model_folder: Path, tmp_path: Path
) -> AsyncIterator[Secured]:
    """A gateway that asks who calls, with the options of the test's marker `wire`."""
    marker = request.node.get_closest_marker("wire")
    options = marker.kwargs if marker else {}
    async with secured(nats_url, model_folder, tmp_path, **options) as opened_mesh:
        yield opened_mesh
