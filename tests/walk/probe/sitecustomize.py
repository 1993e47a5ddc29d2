"""Count the functions that the gateway of `tests.walk` calls.

Python imports this module when a process starts. It answers one command a line on a Unix socket, with JSON:

- `begin [task]` counts from now on, with `task` until the process publishes one;
- `end` returns the calls of each function of the counted packages;
- `instances` returns how many instances there are of each class of the counted packages.
"""

import gc
import json
import os
import socket
import sys
import threading
from collections import Counter
from types import CodeType, FrameType
from typing import Any, Final

SOCKETS: Final = os.environ.get("SLUICE_WALK_SOCKETS")
COUNTED: Final = {"gateway": ("gateway", "sluice")}
"""The packages that are counted in each process."""
_PUBLISH: Final = os.path.join("nats", "aio", "client.py"), "publish"
"""What publishes a task: a file and its function."""


class Probe:
    """The calls of some packages, by file and function."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages
        self._root = os.getcwd() + os.sep
        self._folders = tuple(self._root + package + os.sep for package in packages)
        self._calls: Counter[CodeType] = Counter()
        self._kinds: dict[CodeType, str] = {}
        """Of code that has run: "counted", "publish" or nothing."""
        self._until_task = False
        self._counts = False
        threading.setprofile(self._profile)

    def profile_here(self) -> None:
        """Count in this thread too; threads that start later are counted by themselves."""
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self._counts:
            return
        code = frame.f_code
        kind = self._kinds.get(code)
        if kind is None:
            kind = self._kinds[code] = self._kind_of(code)
        if kind and _is_start(frame):
            if (
                self._until_task
                and kind == "publish"
                and frame.f_locals["subject"].endswith(".task")
            ):
                self._counts = False
            elif code.co_filename.startswith(self._folders):
                self._calls[code] += 1

    def _kind_of(self, code: CodeType) -> str:
        file, name = _PUBLISH
        if code.co_filename.endswith(file) and code.co_name == name:
            return "publish"
        # Comprehensions and generator expressions are a part of the function that they stand in.
        is_function = not code.co_name.endswith(("comp>", "genexpr>"))
        return "counted" if is_function and code.co_filename.startswith(self._folders) else ""

    def answer(self, command: str) -> Any:
        """Return the answer to a command."""
        match command.split():
            case ["begin", *until]:
                self._calls.clear()
                self._until_task = until == ["task"]
                self._counts = True
                return None
            case ["end"]:
                self._counts = False
                return {
                    f"{code.co_filename.removeprefix(self._root)}:{code.co_qualname}:{code.co_firstlineno}": calls
                    for code, calls in self._calls.items()
                }
            case ["instances"]:
                gc.collect()
                instances: Counter[str] = Counter()
                for instance in gc.get_objects():
                    module = type(instance).__module__
                    if isinstance(module, str) and module.split(".")[0] in self._packages:
                        instances[f"{module}.{type(instance).__qualname__}"] += 1
                return instances
        raise ValueError(command)


def _is_start(frame: FrameType) -> bool:
    """Return whether a function begins: a generator or coroutine that goes on is entered as well."""
    code = frame.f_code.co_code
    return frame.f_lasti < 0 or code[frame.f_lasti + 1] == 0


def _serve(probe: Probe, path: str) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(1)
        while True:
            connection, _ = server.accept()
            with connection, connection.makefile("rw") as lines:
                for line in lines:
                    lines.write(json.dumps(probe.answer(line)) + "\n")
                    lines.flush()


def _process() -> str:
    words = sys.orig_argv
    return words[words.index("-m") + 1] if "-m" in words[:-1] else ""


if SOCKETS is not None and _process() in COUNTED:
    _probe = Probe(COUNTED[_process()])
    _arguments = (_probe, os.path.join(SOCKETS, _process()))
    threading.Thread(target=_serve, args=_arguments, daemon=True).start()
    _probe.profile_here()
