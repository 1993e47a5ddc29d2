"""Whether answers can be constrained to what callers ask: each constraint is compiled once, beside the event loop.

The compiler's limits do not bound its time and memory, so it runs in processes that have such bounds
(`constraint_child`), two at a time. Tenants take turns; what was found is kept by the hash of the constraint.
"""

import asyncio
import hashlib
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from gateway.admission.constraint_child import MEMORY_BYTES, SECONDS
from gateway.admission.tenant_threads import TenantQueue
from sluice.constraints import costly_part, problem_before
from sluice.errors import RETRY_AFTER_S, Overloaded

_log = logging.getLogger(__name__)

CHILDREN: Final = 2
KNOWN_MAX: Final = 4096
"""Findings that are kept; the oldest make room."""
WAITING_MAX: Final = 16
"""Constraints of a tenant that may wait to be compiled."""
_START_S: Final = 20.0


@dataclass(frozen=True)
class _Waiting:
    key: bytes
    kind: str
    text: str
    found: "asyncio.Future[str | None]"


class ConstraintChecks:
    """The constraints of one gateway's requests."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        self._open: dict[bytes, asyncio.Future[str | None]] = {}
        self._waiting: TenantQueue[_Waiting] = TenantQueue()
        self._children: set[_Child] = set()
        self._idle: list[_Child] = []
        self._threads = ThreadPoolExecutor(CHILDREN, "constraints")
        self._runners: set[asyncio.Task[None]] = set()

    async def problem(self, kind: str, text: str, tenant: str) -> str | None:
        """Why answers cannot be constrained to ``text``, a "json_schema", "regex" or "grammar"; None when they can.

        Raises:
            Overloaded: too many constraints of ``tenant`` wait.
        """
        early = problem_before(kind, text)
        if early is not None:
            return early
        key = hashlib.blake2b(f"{kind} {text}".encode(), digest_size=16).digest()
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        found = self._open.get(key) or self._queue(_Waiting(key, kind, text, _future()), tenant)
        return await asyncio.shield(found)  # others may wait for it too

    def close(self) -> None:
        """Ends the children; who waits is cancelled."""
        for task in self._runners:
            task.cancel()
        for child in self._idle:
            child.close()
        for child in self._children.difference(self._idle):
            child.kill()  # its thread closes it
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _queue(self, one: _Waiting, tenant: str) -> "asyncio.Future[str | None]":
        if self._waiting.count(tenant) >= WAITING_MAX:
            raise Overloaded(
                f"{WAITING_MAX} constraints of your tenant wait to be compiled; equal ones are compiled once",
                retry_after_s=RETRY_AFTER_S,
            )
        self._waiting.add(tenant, one)
        self._open[one.key] = one.found
        if len(self._runners) < CHILDREN:
            runner = asyncio.create_task(self._run())
            self._runners.add(runner)
            runner.add_done_callback(self._runners.discard)
        return one.found

    async def _run(self) -> None:
        while (one := self._waiting.next()) is not None:
            try:
                problem = await self._compiled(one)
            except OSError as error:
                _log.exception("no process compiles constraints")
                one.found.set_exception(Overloaded(f"no process compiles constraints: {error}"))
            except asyncio.CancelledError:
                one.found.cancel()
                raise
            else:
                self._known[one.key] = problem
                if len(self._known) > KNOWN_MAX:
                    self._known.popitem(last=False)
                one.found.set_result(problem)
            finally:
                del self._open[one.key]

    async def _compiled(self, one: _Waiting) -> str | None:
        """Raises OSError when no child can be started."""
        loop = asyncio.get_running_loop()
        child = self._idle.pop() if self._idle else None
        if child is None:
            child = await loop.run_in_executor(self._threads, _Child)
            self._children.add(child)
        problem = await loop.run_in_executor(self._threads, child.problem, one.kind, one.text)
        if child.ended:
            self._children.discard(child)
        else:
            self._idle.append(child)
        return problem


class _Child:
    """A process that compiles. Its methods block, for a limited time.

    Attributes:
        ended: it takes no more.
    """

    def __init__(self) -> None:
        """Raises OSError when it does not come up."""
        self.ended = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gateway.admission.constraint_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # the kernel may share cores by session
        )
        if self._ask("regex", "x", _START_S) is None:
            raise ChildProcessError("a process that compiles constraints did not come up")

    def problem(self, kind: str, text: str) -> str | None:
        """See `ConstraintChecks.problem`; a constraint over the limits ends the process."""
        try:
            answer = self._ask(kind, text, SECONDS)
        except TimeoutError:
            return f"takes over {SECONDS:g} s to compile: {costly_part(kind, text)}"
        if answer is None:
            most = f"{MEMORY_BYTES >> 20} MiB"
            return f"takes over {most} to compile: {costly_part(kind, text)}"
        found: str | None = json.loads(answer)["problem"]
        return found

    def kill(self) -> None:
        """Ends it; from any thread."""
        self.ended = True
        self.process.kill()

    def close(self) -> None:
        """Ends it and waits for that."""
        self.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _ask(self, kind: str, text: str, timeout_s: float) -> bytes | None:
        """The answer, a line; None when the process has ended. Raises TimeoutError, and the process has ended too."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        answer, until = b"", time.monotonic() + timeout_s
        try:
            self.process.stdin.write(json.dumps({"kind": kind, "text": text}).encode() + b"\n")
            poll = select.poll()
            poll.register(self.process.stdout, select.POLLIN)
            while not answer.endswith(b"\n"):
                left_ms = (until - time.monotonic()) * 1000
                if left_ms <= 0 or not poll.poll(left_ms):
                    raise TimeoutError
                piece = os.read(self.process.stdout.fileno(), 65_536)
                if not piece:
                    break
                answer += piece
        except BrokenPipeError:
            pass
        finally:
            if not answer.endswith(b"\n"):
                self.close()
        return answer if answer.endswith(b"\n") else None


def _future() -> "asyncio.Future[str | None]":
    made: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
    return made
