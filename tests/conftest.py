"""Fixtures of the whole suite."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings as hypothesis_settings

from sluice.startup import free_port
from supervisor.nats import wait_for_nats
from tests.support.mesh import RunningMesh, mesh_on_a_thread
from tests.support.nats import START_S, delete_streams, nats_process

# Nothing here asks a model hub, and torch threads that spin would only slow each other down.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says more about the machine than about the code.
hypothesis_settings.register_profile("suite", deadline=None)
hypothesis_settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist, which reads the marks in its own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps together what one process of pytest-xdist must run: a file, and all tests that start a mesh.

    So no two meshes run at once, and the fixtures of a module are made once. The meshes take longest and come first.
    """
    groups = {item: "mesh" if starts_a_mesh(item) else item.nodeid.split("::")[0] for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: groups[item] != "mesh")


def starts_a_mesh(item: pytest.Item) -> bool:
    """Whether the test is marked so, or uses the mesh of the suite."""
    return item.get_closest_marker("mesh") is not None or "mesh" in getattr(
        item, "fixturenames", ()
    )


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a nats-server with JetStream for all tests that do not stop it."""
    with nats_process(tmp_path_factory.mktemp("nats"), free_port()) as url:
        asyncio.run(wait_for_nats(url, START_S))
        yield url


@pytest.fixture
async def nats_url(nats_server: str) -> str:
    """URL of a nats-server with JetStream that holds nothing."""
    await delete_streams(nats_server)
    return nats_server


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
