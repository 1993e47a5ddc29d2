"""Fixtures of the whole suite."""

import asyncio
import gc
import os
import re
import signal
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from tests.support.forks import Forks

if TYPE_CHECKING:
    from tests.support.mesh import RunningMesh

# Nothing here asks a model hub. Threads of torch that spin would slow each other down, those of tokenizers are lost in
# the processes that `Forks` starts.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A nats-server for each process of tests, on a core or less: its threads and its garbage collector need not hurry.
os.environ.setdefault("GOMAXPROCS", "1")
os.environ.setdefault("GOGC", "400")

# The default mesh of the suite is that of the specialists, also where the general model was downloaded: tests of that
# one use tests/support/chat_model.py.
os.environ.setdefault("SLUICE_TEST_MODEL_CACHE", os.environ.get("SLUICE_MODEL_CACHE", ""))
os.environ["SLUICE_MODEL_CACHE"] = "/nonexistent/sluice"


def reset_signals() -> None:
    """Handle signals as a command in a terminal does: processes that tests start inherit what is ignored or blocked.

    A shell that runs the suite in the background makes it ignore Ctrl-C, nohup makes it ignore SIGHUP, and so does a
    gateway or batcher that a test runs in this process.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


reset_signals()

# How long an example takes says more about the machine than about the code. A default run makes the same examples each
# time; scripts/test --all makes new and more ones (--hypothesis-profile=search).
_NOT_TIMED: Final[dict[str, Any]] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
}
hypothesis_settings.register_profile("search", **_NOT_TIMED)
hypothesis_settings.register_profile(
    "suite", derandomize=True, database=None, max_examples=15, **_NOT_TIMED
)
hypothesis_settings.load_profile("suite")


ROOT: Final = Path(__file__).parents[1]
ASKS_THE_MESH: Final = re.compile(r"\bRunningMesh\b")
STARTS_A_MESH: Final = re.compile(r"\bmark\.mesh\b")
SERVERS: Final = frozenset({"nats_server", "echo_triton", "served"})
"""Fixtures that run processes for many tests."""
STARTS_PROCESSES: Final = "tests/supervisor/"
LONG: Final = tuple(
    f"tests/{name}/" for name in ("batcher", "jobs", "learning", "model_workers", "supervisor")
)
"""Folders with files that take more than ten seconds: they come early, so that all processes end together."""
MESH: Final = "the mesh of the suite"
"""The group of all files whose tests ask it."""
MESHES: Final = "other meshes"
"""The group of all other files whose tests start one."""
running_mesh: Final = ExitStack()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processes", type=int, default=0, help="processes that share the tests; 0: none"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Share the tests among processes if the command asks for some; the debugger needs the terminal."""
    if config.option.processes and not config.option.usepdb:
        config.pluginmanager.register(Forks(config.option.processes, group_of))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole meshes come first, then files whose tests wait for servers, evenly among those that compute."""
    groups = {item: group_of(item) for item in items}
    waits = {groups[one] for one in items if SERVERS.intersection(fixtures_of(one))}
    waits |= {group for group in groups.values() if group.startswith(STARTS_PROCESSES)}
    files = sorted(
        {*groups.values()} - {MESH, MESHES}, key=lambda file: (not file.startswith(LONG), file)
    )
    places = {MESH: -2.0, MESHES: -1.0}
    for kind in ([f for f in files if f in waits], [f for f in files if f not in waits]):
        places |= {file: at / len(kind) for at, file in enumerate(kind)}
    items.sort(key=lambda item: (places[groups[item]], groups[item]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests and all their modules stay to the end: the garbage collector need not look at them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def fixtures_of(item: pytest.Item) -> list[str]:
    """The fixtures that a test asks for, also through others."""
    return getattr(item, "fixturenames", [])


def group_of(item: pytest.Item) -> str:
    """The group of a test's file."""
    return group_of_file(item.path)


@cache
def group_of_file(file: Path) -> str:
    """The file itself, so that fixtures of a module are made once; no more than two meshes run at once."""
    text = file.read_text(encoding="utf-8")
    if ASKS_THE_MESH.search(text):
        return MESH
    return MESHES if STARTS_A_MESH.search(text) else os.path.relpath(file, ROOT)


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a nats-server with JetStream for all tests that do not stop it."""
    from sluice.startup import free_port
    from supervisor.nats import wait_for_nats
    from tests.support.nats import START_S, nats_process

    with nats_process(tmp_path_factory.mktemp("nats"), free_port()) as url:
        asyncio.run(wait_for_nats(url, START_S))
        yield url


@pytest.fixture
async def nats_url(nats_server: str) -> str:
    """URL of a nats-server with JetStream that holds nothing."""
    from tests.support.nats import delete_streams

    await delete_streams(nats_server)
    return nats_server


@pytest.fixture(scope="session")
def mesh() -> "RunningMesh":
    """The suite's mesh: started by the first test that asks, ended after the last one of `MESH`."""
    from tests.support.mesh import mesh_on_a_thread

    return running_mesh.enter_context(mesh_on_a_thread())


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Leave nothing to the next test that it did not ask for: a mesh that computes beside it, or ignored signals."""
    reset_signals()
    if nextitem is None or group_of(nextitem) != group_of(item):
        running_mesh.close()


@pytest.fixture(scope="session")
def classifier_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of prompts, trained when the first test asks for it."""
    from tests.support.tiny_classifier import save_classifier  # torch: not for every test run

    return save_classifier(tmp_path_factory.mktemp("classifier"))
