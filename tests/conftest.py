"""Fixtures of the whole suite."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings as hypothesis_settings

from tests.support.mesh import RunningMesh, mesh_on_a_thread
from tests.support.nats import running_nats

# Nothing here asks a model hub, and torch threads that spin would only slow each other down.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says more about the machine than about the code.
hypothesis_settings.register_profile("suite", deadline=None)
hypothesis_settings.load_profile("suite")


@pytest.fixture
async def nats_url(tmp_path: Path) -> AsyncIterator[str]:
    """A nats-server with JetStream of this test's own."""
    async with running_nats(tmp_path) as url:
        yield url


@pytest.fixture(scope="session")
def mesh() -> Iterator[RunningMesh]:
    """The suite's mesh: started by the first test that asks, ended after the last test."""
    with mesh_on_a_thread() as running:
        yield running


@pytest.fixture(scope="session")
def classifier_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of prompts, trained when the first test asks for it."""
    from tests.support.tiny_classifier import save_classifier  # torch: not for every test run

    return save_classifier(tmp_path_factory.mktemp("classifier"))
