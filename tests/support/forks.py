"""Share the tests among processes, ``--processes``, that are forked once all tests are collected.

To collect is to import all test files, and torch: ten seconds, which each process of pytest-xdist takes for itself.
"""

import threading
from collections.abc import Callable, Iterator
from itertools import groupby
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest

FORK: Final = get_context("fork")


class Sender:
    """In a process of tests: sends what pytest would show to the first process."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config = config
        self._pipe = pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(data)


class Forks:
    """Runs the tests in processes.

    Args:
        count: number of processes.
        group_of: returns the group of a test. One process runs the tests of a group, which follow each other.
    """

    def __init__(self, count: int, group_of: Callable[[pytest.Item], str]) -> None:
        self._count = count
        self._group_of = group_of
        self._next_group = FORK.Value("i", 0)
        self._stop = FORK.Event()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest's own loop says what is wrong, or runs nothing
        threads = [one.name for one in threading.enumerate()]
        assert len(threads) == 1, f"a fork loses threads, so test files start none: {threads}"
        with TemporaryDirectory(prefix="sluice-tests-") as folder:
            folders = [Path(folder, str(number)) for number in range(self._count)]
            processes = [self._fork(session, folder) for folder in folders]
            try:
                self._show(session, dict(processes))
            finally:
                self._stop.set()
                for _, process in processes:
                    process.join()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        return True

    def _fork(self, session: pytest.Session, folder: Path) -> tuple[Connection, ForkProcess]:
        """Start a process and return what it sends its reports to."""
        reader, writer = FORK.Pipe(duplex=False)
        process = FORK.Process(target=self._run, args=(session, folder, writer))
        process.start()
        writer.close()
        return reader, process

    def _show(self, session: pytest.Session, processes: dict[Connection, ForkProcess]) -> None:
        """Hand the reports of all processes to pytest; a test that has none failed."""
        hook = session.config.hook
        unfinished = {item.nodeid: item for item in session.items}
        while processes:
            for reader in wait(list(processes)):
                assert isinstance(reader, Connection)
                try:
                    data = reader.recv()
                except EOFError:
                    processes.pop(reader)
                    continue
                report = hook.pytest_report_from_serializable(config=session.config, data=data)
                hook.pytest_runtest_logreport(report=report)
                if report.when == "teardown":
                    item = unfinished.pop(report.nodeid)
                    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            if session.shouldfail:
                self._stop.set()
        if not session.shouldfail:
            for item in unfinished.values():
                report = pytest.TestReport(
                    item.nodeid, item.location, {}, "failed", "its process ended", "call"
                )
                hook.pytest_runtest_logreport(report=report)

    def _run(self, session: pytest.Session, folder: Path, pipe: Connection) -> None:
        """Run one group after the other in this process, with temporary files in `folder`."""
        config = session.config
        plugins: Any = config.pluginmanager
        plugins.unregister(name="terminalreporter")
        plugins.register(Sender(config, pipe))
        capture = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are those of all processes
        capture.start_global_capturing()
        capture.suspend_global_capture(in_=True)
        config.option.basetemp = folder
        plugins.getplugin("tmpdir").pytest_configure(config)
        tests = self._tests(session)
        item = next(tests, None)
        try:
            while item and not self._stop.is_set():
                following = next(tests, None)
                config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                item = following
        finally:
            plugins.getplugin("runner").pytest_sessionfinish(session)

    def _tests(self, session: pytest.Session) -> Iterator[pytest.Item]:
        """Yield the tests of the next group that no process has taken, and so on."""
        for number, (_, tests) in enumerate(groupby(session.items, self._group_of)):
            with self._next_group.get_lock():
                if number != self._next_group.value:
                    continue
                self._next_group.value += 1
            yield from tests
