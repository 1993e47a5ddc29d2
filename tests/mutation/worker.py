"""A process that has imported all tests, and forks one for each mutant: python -m tests.mutation.worker.

Commands come as lines of JSON from one pipe, and answers go to another one. A function is changed in the fork, by
giving it other code. What is outside of functions happens when a module is imported, so such a mutant gets a process of
its own that takes the changed file in the place of the one on disk. Nothing is written into the checkout.
"""

import gc
import importlib.machinery
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Final

import pytest
from _pytest.runner import runtestprotocol

from tests.mutation.operators import Mutant, mutants_of, mutated

NATS: Final = "MUTATION_NATS"
"""In the environment: the URL of a server that the fixture of the suite gives to all tests, one after the other."""
MUTANT: Final = "MUTATION_MUTANT"
"""In the environment: the file, the names and the number of the mutant of this process."""
FRESH_S: Final = 20.0
"""What a process takes to import everything, at most."""
KILLED, SURVIVED, TIMED_OUT = "killed", "survived", "timeout"
LAST, BROKEN = 254, 255
"""Statuses of a fork: the test that failed, at most 254; it failed outside of tests."""


class Worker:
    """Plugin of pytest: instead of running all tests it does what it is told."""

    def __init__(self, commands: int, answers: int) -> None:
        self._fd = commands
        self._commands = os.fdopen(commands, encoding="utf-8")
        self._answers = os.fdopen(answers, "w", encoding="utf-8")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            self._say({"error": "the tests cannot be collected"})
            return True
        self._items = {item.nodeid: item for item in session.items}
        self._root = session.config.rootpath
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._functions = functions_in(self._root)
        with one_nats(session.items):
            self._say({"tests": list(self._items)})
            for line in self._commands:
                command = json.loads(line)
                self._say(self._trace(command) if "trace" in command else self._try(command))
        return True

    def _say(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)

    def _trace(self, command: dict[str, Any]) -> dict[str, Any]:
        """Writes, of each test, how long it takes and the lines of the files that it runs."""
        files = {str(self._root / file): file for file in command["files"]}

        def work() -> int:
            found, tests = dict[str, Any](), [self._items[one] for one in command["trace"]]
            for test, following in zip(tests, [*tests[1:], None], strict=True):
                tracer, since = Tracer(files), time.monotonic()
                with tracer:
                    passed = passes(test, following)
                taken_s = time.monotonic() - since
                found[test.nodeid] = {"s": taken_s, "passed": passed, "lines": tracer.lines}
            Path(command["to"]).write_text(json.dumps(found), encoding="utf-8")
            return 0

        return {"outcome": forked(work, self._fd, command["limit_s"])[0]}

    def _try(self, command: dict[str, Any]) -> dict[str, Any]:
        """Runs tests on a mutant until one fails."""
        since, tests = time.monotonic(), command["tests"]
        file, names, at = command["mutant"]
        source = (self._root / file).read_text(encoding="utf-8")
        mutant = next(one for one in mutants_of(file, source, names) if one.at == at)
        code, live = None, list[FunctionType]()
        if mutant.function is not None:
            code = code_of(source, mutant, self._root)
            live = self._functions.get((code.co_filename, *mutant.function), live)

        def work() -> int:
            for function in live:
                function.__code__ = code
            limits_s = command["limits_s"]
            for number, (test, limit_s) in enumerate(zip(tests, limits_s, strict=True), start=1):
                following = self._items[tests[number]] if number < len(tests) else None
                status = min(number, LAST)
                hangs = threading.Timer(limit_s, os._exit, [status])
                hangs.daemon = True
                hangs.start()
                passed = passes(self._items[test], following)
                hangs.cancel()
                if not passed:
                    return status
            return 0

        if code is None or any(one.__code__.co_freevars != code.co_freevars for one in live):
            outcome, by = fresh(self._root, command)
        elif not live:
            return {"error": f"{mutant}: no function has this code"}
        else:
            outcome, number = forked(work, self._fd, sum(command["limits_s"]))
            if number == BROKEN:
                return {"error": f"{mutant}: it could not be tried"}
            by = tests[number - 1] if number else ""
        return {"outcome": outcome, "by": by, "s": time.monotonic() - since}


def passes(test: pytest.Item, following: pytest.Item | None) -> bool:
    reports = runtestprotocol(test, log=False, nextitem=following)
    return not any(report.failed for report in reports)


def forked(work: Any, commands: int, limit_s: float) -> tuple[str, int]:
    """What a fork found, and its number, after at most ``limit_s``; what it started ends with it.

    So does everything when ``commands`` is closed meanwhile.
    """
    child = os.fork()
    if not child:
        status = BROKEN
        try:
            os.setpgid(0, 0)
            status = work()
        finally:
            os._exit(status)
    with suppress(OSError):  # it has done so itself
        os.setpgid(child, child)
    status = waited(child, commands, limit_s)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
        return TIMED_OUT, 0
    number = os.waitstatus_to_exitcode(status)
    if number == 0:
        return SURVIVED, 0
    return KILLED, max(number, 0)


def waited(child: int, commands: int, limit_s: float) -> int | None:
    """The status of ``child``; None: it still runs, or nobody wants to know, because ``commands`` is closed."""
    opened = os.pidfd_open(child)
    try:
        ready, _, _ = select.select([opened, commands], [], [], limit_s)
    finally:
        os.close(opened)
    return os.waitpid(child, 0)[1] if opened in ready else None


def fresh(root: Path, command: dict[str, Any]) -> tuple[str, str]:
    """As `forked`, of a process that imports the changed file."""
    environment = {**os.environ, MUTANT: json.dumps(command["mutant"])}
    arguments = ["-x", "-n", "0", "-q", "--no-header", "--tb=no", *command["tests"]]
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "tests.mutation.worker", *arguments],
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=FRESH_S + sum(command["limits_s"][:8]))
        except subprocess.TimeoutExpired:
            return TIMED_OUT, ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    failed = [
        line.split()[1] for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))
    ]
    return (SURVIVED if process.returncode == 0 else KILLED), next(iter(failed), "")


def functions_in(root: Path) -> dict[tuple[str, str, int], list[FunctionType]]:
    """All functions that were made of files below ``root``, by file, name and first line."""
    found = defaultdict[tuple[str, str, int], list[FunctionType]](list)
    gc.unfreeze()
    for one in gc.get_objects():
        if isinstance(one, FunctionType) and one.__code__.co_filename.startswith(f"{root}/"):
            code = one.__code__
            found[code.co_filename, code.co_qualname, code.co_firstlineno].append(one)
    gc.freeze()
    return found


def code_of(source: str, mutant: Mutant, root: Path) -> CodeType:
    """The code of the outermost function around the change of ``mutant``."""
    module = compile(mutated(source, mutant), str(root / mutant.file), "exec", dont_inherit=True)
    return next(
        code
        for code in codes_in(module)
        if (code.co_qualname, code.co_firstlineno) == mutant.function
    )


def codes_in(code: CodeType) -> Iterator[CodeType]:
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one
            yield from codes_in(one)


@contextmanager
def one_nats(items: Sequence[pytest.Item]) -> Iterator[None]:
    """Tests share one nats-server, which each of them empties."""
    if not any("nats_server" in getattr(item, "fixturenames", ()) for item in items):
        yield
        return
    import asyncio
    import tempfile

    from sluice.startup import free_port
    from supervisor.nats import wait_for_nats
    from tests.support.nats import START_S, nats_process

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(nats_process(folder, free_port()))
        asyncio.run(wait_for_nats(url, START_S))
        os.environ[NATS] = url
        yield


class Tracer:
    """The lines of some files that run meanwhile, in all threads."""

    def __init__(self, files: dict[str, str]) -> None:
        """``files``: their absolute paths, with names."""
        self._files = files
        self._seen = set[tuple[str, int]]()

    @property
    def lines(self) -> dict[str, list[int]]:
        found = defaultdict[str, list[int]](list)
        for file, line in sorted(self._seen):
            found[self._files[file]].append(line)
        return found

    def __enter__(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _call(self, frame: FrameType, event: str, _: object) -> Any:
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self._seen.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line


class ChangedFile:
    """Finds the module of one file, and gives it the code of a mutant."""

    def __init__(self, root: Path, mutant: Mutant) -> None:
        self._root, self._mutant = root, mutant
        self._name = mutant.file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = self._execute  # type: ignore[method-assign]
        return spec

    def _execute(self, module: ModuleType) -> None:
        file = self._root / self._mutant.file
        tree = mutated(file.read_text(encoding="utf-8"), self._mutant)
        exec(compile(tree, str(file), "exec", dont_inherit=True), module.__dict__)


def become(named: str) -> None:
    """This process, a plugin of which this module is, runs the tests of one mutant."""
    root, (file, names, at) = Path.cwd(), json.loads(named)
    source = (root / file).read_text(encoding="utf-8")
    mutant = next(one for one in mutants_of(file, source, names) if one.at == at)
    sys.meta_path.insert(0, ChangedFile(root, mutant))  # type: ignore[arg-type]


if MUTANT in os.environ:  # before a conftest imports the file that is changed
    become(os.environ.pop(MUTANT))
elif __name__ == "__main__":
    commands, answers, *arguments = sys.argv[1:]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    plugin = Worker(int(commands), int(answers))
    sys.exit(pytest.main(["-s", "-n", "0", *arguments], plugins=[plugin]))
