"""What `tests.walk` puts into the gateway and the batcher of its mesh: it counts the functions that they call.

Python imports it when a process starts. It answers one command a line on a Unix socket, with JSON: `begin [task]`
counts from now on, with `task` until the process publishes one; `end` says the calls of each function of its package;
`instances` says how many instances there are of each class of its package.
"""

import gc
import json
import os
import socket
import sys
import threading
from collections import Counter
from types import CodeType
from typing import Any, Final

SOCKETS: Final = os.environ.get("SLUICE_WALK_SOCKETS")
_PUBLISH: Final = (
    (os.path.join("nats", "aio", "client.py"), "publish"),
    (os.path.join("sluice", "wire", "connection.py"), "send"),
)
"""What publishes a task, by file and function: of nats-py, and of the client that publishes in one step."""
_TOOL: Final = 4  # one that `sys.monitoring` leaves to everybody


class Probe:
    """The calls of one package, by file and function."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._folder = os.path.join(os.getcwd(), package) + os.sep
        self._calls: Counter[CodeType] = Counter()
        self._until_task = False
        self._counts = False
        events = sys.monitoring.events
        sys.monitoring.use_tool_id(_TOOL, "sluice-walk")
        sys.monitoring.register_callback(_TOOL, events.PY_START, self._started)
        sys.monitoring.set_events(_TOOL, events.PY_START)

    def _started(self, code: CodeType, _: int) -> Any:
        if code.co_filename.startswith(self._folder):
            if self._counts:
                self._calls[code] += 1
        elif any(
            code.co_filename.endswith(file) and code.co_name == name for file, name in _PUBLISH
        ):
            subject = sys._getframe(1).f_locals["subject"]
            if self._until_task and subject.endswith(".task"):
                self._counts = False
        else:
            return sys.monitoring.DISABLE  # nothing of it is counted: it costs nothing from now on
        return None

    def answer(self, command: str) -> Any:
        """See above."""
        match command.split():
            case ["begin", *until]:
                self._calls.clear()
                self._until_task = until == ["task"]
                self._counts = True
                return None
            case ["end"]:
                self._counts = False
                return {
                    f"{code.co_filename[len(self._folder) :]}:{code.co_qualname}:{code.co_firstlineno}": calls
                    for code, calls in self._calls.items()
                }
            case ["instances"]:
                gc.collect()
                found: Counter[str] = Counter()
                for one in gc.get_objects():
                    of = type(one)
                    module = of.__module__
                    if isinstance(module, str) and module.split(".")[0] == self._package:
                        found[f"{module}.{of.__qualname__}"] += 1
                return found
        raise ValueError(command)


def _serve(package: str, path: str) -> None:
    probe = Probe(package)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(1)
        while True:
            connection, _ = server.accept()
            with connection, connection.makefile("rw") as lines:
                for line in lines:
                    lines.write(json.dumps(probe.answer(line)) + "\n")
                    lines.flush()


def _package() -> str:
    words = sys.orig_argv
    return words[words.index("-m") + 1] if "-m" in words[:-1] else ""


if SOCKETS is not None and _package() in ("gateway", "batcher"):
    _at = (_package(), os.path.join(SOCKETS, _package()))
    threading.Thread(target=_serve, args=_at, daemon=True).start()
