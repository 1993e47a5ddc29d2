"""Checks whether answers can be constrained as callers ask: each constraint is compiled once, beside the event loop.

The compiler's limits do not bound its time and memory, so it runs in processes that have such bounds
(`constraint_child`), two at a time. Tenants take turns; results are cached by the hash of the constraint.
"""

import asyncio
import hashlib
import json
import logging
import select
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Final

from gateway.admission.class_limiter import CountLimit
from gateway.admission.constraint_child import MEMORY_BYTES, SECONDS
from gateway.admission.turns import TenantThreads
from gateway.models.tools import HERMES, arguments_of, grammar_of
from gateway.validation.requests import ValidRequest
from sluice.constraint_reasons import SIMPLER
from sluice.constraints import problem_before
from sluice.errors import InvalidRequest, Overloaded

logger = logging.getLogger(__name__)

CHILDREN: Final = 2
"""Processes that compile: constraints are rare, and each process takes memory."""
RESULTS_MAX: Final = 4096
"""Results that are cached; the oldest is evicted."""
OPEN_MAX: Final = 16
"""Constraints of a tenant that may be compiled, or wait for it."""
_START_S: Final = 20.0
"""How long a process may take to start, in seconds: it imports the compiler."""


class ConstraintChecks:
    """Checks the constraints of one gateway's requests.

    Attributes:
        results: Results, or the tasks that compute them, by the hash of the constraint.
        open: Constraints of each tenant that are compiled, or wait for it.
        threads: Threads that wait for the processes.
        busy: Processes that compile.
        idle: Processes that wait.
    """

    def __init__(self, results_max: int = RESULTS_MAX) -> None:
        """Cache up to `results_max` results."""
        self._results_max = results_max
        self.results: OrderedDict[bytes, asyncio.Task[str | None]] = OrderedDict()
        self.open = CountLimit(
            OPEN_MAX,
            "tenant_constraints",
            "constraints of your tenant wait to be compiled; equal ones are compiled once",
        )
        self.threads = TenantThreads("constraints", CHILDREN, own=None)
        self.busy: set[_Child] = set()
        self.idle: list[_Child] = []

    async def check(self, request: ValidRequest) -> None:
        """Raise InvalidRequest for a constraint of `request` that no worker could enforce, or as `problem`."""
        for field, kind, text in _constraints_of(request):
            problem = await self.problem(kind, text, request.tenant)
            if problem is not None:
                raise InvalidRequest.of(field, problem)

    async def problem(self, kind: str, text: str, tenant: str) -> str | None:
        """Return why answers cannot be constrained to `text`, a "json_schema", "regex" or "grammar"; None if they can.

        Raises:
            Overloaded: Too many constraints of `tenant` wait.
        """
        early = problem_before(kind, text)
        if early is not None:
            return early
        key = hashlib.blake2b(f"{kind} {text}".encode(), digest_size=16).digest()
        if key in self.results:
            self.results.move_to_end(key)
        else:
            self.open.take(tenant)
            self.results[key] = asyncio.create_task(self._compiled(key, kind, text, tenant))
        return await asyncio.shield(self.results[key])  # others may wait for it too

    def close(self) -> None:
        """End the processes, and cancel checks that wait."""
        for compiling in list(self.results.values()):
            compiling.cancel()
        self.threads.close()
        for child in self.idle:
            child.close()
        for child in list(self.busy):
            child.kill()  # its thread closes it

    async def _compiled(self, key: bytes, kind: str, text: str, tenant: str) -> str | None:
        try:
            problem = await self.threads.run(tenant, partial(self._ask_child, kind, text))
        except BaseException as error:
            self.results.pop(key, None)
            if not isinstance(error, OSError):
                raise
            logger.exception("starting a process that compiles constraints failed")
            raise Overloaded("no process compiles constraints now; try again") from None
        finally:
            self.open.give(tenant)
        while len(self.results) > self._results_max:
            self.results.popitem(last=False)
        return problem

    def _ask_child(self, kind: str, text: str) -> str | None:
        """Return what a process finds, in a thread; raise OSError if none can be started."""
        child = self.idle.pop() if self.idle else _Child()
        self.busy.add(child)
        problem = child.problem(kind, text)
        self.busy.remove(child)
        if not child.ended:
            self.idle.append(child)
        return problem


class _Child:
    """A process that compiles. Its methods block, for a limited time.

    Attributes:
        ended: Whether it takes no more constraints.
        process: The process.
    """

    def __init__(self) -> None:
        """Start the process; raise OSError if that fails."""
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
            raise ChildProcessError("a process that compiles constraints did not start")

    def problem(self, kind: str, text: str) -> str | None:
        """Return as `ConstraintChecks.problem`; a constraint over the limits ends the process."""
        try:
            answer = self._ask(kind, text, SECONDS)
        except TimeoutError:
            return f"takes over {SECONDS:g} s to compile: {SIMPLER}"
        if answer is None:
            return f"takes over {MEMORY_BYTES >> 20} MiB to compile: {SIMPLER}"
        problem: str | None = json.loads(answer)["problem"]
        return problem

    def kill(self) -> None:
        """Kill the process; from any thread."""
        self.ended = True
        self.process.kill()

    def close(self) -> None:
        """Kill the process and wait for its end."""
        self.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _ask(self, kind: str, text: str, timeout_s: float) -> bytes | None:
        """Return the answer, a line; None if the process has ended.

        Raises:
            TimeoutError: It took too long; the process was killed.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        in_time, answer = True, b""
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"kind": kind, "text": text}).encode() + b"\n")
            in_time = bool(poll.poll(1000 * timeout_s))
            answer = self.process.stdout.readline() if in_time else b""
        if answer.endswith(b"\n"):
            return answer
        self.close()
        if not in_time:
            raise TimeoutError
        return None


def _constraints_of(request: ValidRequest) -> Iterator[tuple[str, str, str]]:
    """Yield what the answer is constrained to: the field that says it, the kind, and the text."""
    sampling, tools = request.sampling, request.tools
    kind = sampling.WhichOneof("constraint")
    if kind is not None:
        yield f"sampling.{kind}", kind, getattr(sampling, kind)
    if tools is not None and tools.constrained:
        for i, tool in enumerate(tools.tools):
            if tool in tools.callable and (tools.forced or tool.strict):
                schema = json.dumps(arguments_of(tool))
                yield f"tools[{i}].parameters", "json_schema", schema
        # All formats have the same schemas; their sum has a limit of its own.
        yield "tools", "grammar", grammar_of(HERMES, tools)
