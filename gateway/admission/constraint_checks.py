"""Checks whether answers can be constrained as callers ask: each constraint is compiled once, beside the event loop.

The compiler's limits do not bound its time and memory, so it runs in processes that have such bounds
(`constraint_child`), two at a time. Tenants take turns; results are cached by the hash of the constraint.
"""

import asyncio
import hashlib
import json
import logging
import select
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from subprocess import DEVNULL, PIPE, Popen
from typing import Final

from gateway.admission.class_limiter import CountLimit
from gateway.admission.constraint_child import MEMORY_BYTES, SECONDS
from gateway.admission.turns import TenantSlots
from gateway.models.tools import HERMES, arguments_of, grammar_of
from gateway.validation.requests import ValidRequest
from sluice.constraint_reasons import SIMPLER
from sluice.constraints import problem_before
from sluice.errors import InvalidRequest, Overloaded

logger = logging.getLogger(__name__)

CHILDREN: Final = 2
"""Processes that compile: constraints are rare, and each process takes memory."""
RESULTS_MAX: Final = 4096
"""Results that are cached; the one that was unused for longest is evicted."""
OPEN_MAX: Final = 16
"""Constraints of a tenant that may be compiled, or wait for it."""
_START_S: Final = 20.0
"""How long a process may take to start, in seconds: it imports the compiler."""


class ConstraintChecks:
    """Checks the constraints of one gateway's requests.

    Attributes:
        results: Tasks that compute the results and then keep them, by the hash of the constraint.
        open: Constraints of each tenant that are compiled, or wait for it.
        children: Processes that compile, or wait.
    """

    def __init__(self, results_max: int = RESULTS_MAX) -> None:
        """Cache up to `results_max` results."""
        self._results_max = results_max
        self.results: OrderedDict[bytes, asyncio.Task[str | None]] = OrderedDict()
        self.open = CountLimit(OPEN_MAX, "tenant_constraints", "constraints of your tenant")
        self.children = list[Popen[bytes]]()
        self._idle = list[Popen[bytes]]()
        self._slots = TenantSlots(CHILDREN)

    async def check(self, request: ValidRequest) -> None:
        """Raise InvalidRequest for a constraint of `request` that no worker could enforce, or as `problem`."""
        for field, kind, text in _constraints_of(request):
            problem = await self.problem(kind, text, request.tenant)
            if problem is not None:
                raise InvalidRequest.of(field, problem)

    async def problem(self, kind: str, text: str, tenant: str) -> str | None:
        """Return why answers cannot be constrained to `text`, a "json_schema", "regex" or "grammar"; None if they can.

        Raises:
            Overloaded: Too many constraints of `tenant` wait, or no process can be started.
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

    async def close(self) -> None:
        """Cancel checks that wait, and end the processes."""
        for compiling in self.results.values():
            compiling.cancel()
        for child in list(self.children):
            await asyncio.to_thread(self._drop, child)

    async def _compiled(self, key: bytes, kind: str, text: str, tenant: str) -> str | None:
        try:
            async with self._slots.hold_slot(tenant):
                problem = await self.compile(kind, text)
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

    async def compile(self, kind: str, text: str) -> str | None:
        """Return what a process finds; raise OSError if none can be started."""
        return await asyncio.to_thread(self._compile, kind, text)

    def _compile(self, kind: str, text: str) -> str | None:
        # Blocks for a limited time.
        child, answer = self._idle.pop() if self._idle else self._start(), b""
        try:
            answer = _ask(child, kind, text, SECONDS)
        except TimeoutError:
            return f"takes over {SECONDS:g} s to compile: {SIMPLER}"
        finally:
            if answer:
                self._idle.append(child)
            else:
                self._drop(child)
        if not answer:
            return f"takes over {MEMORY_BYTES >> 20} MiB to compile: {SIMPLER}"
        problem: str | None = json.loads(answer)["problem"]
        return problem

    def _start(self) -> Popen[bytes]:
        child = Popen(
            [sys.executable, "-m", "gateway.admission.constraint_child"],
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            bufsize=0,
            start_new_session=True,  # the kernel may share cores by session
        )
        self.children.append(child)
        answer = b""
        try:
            answer = _ask(child, "regex", "x", _START_S)
        finally:
            if not answer:
                self._drop(child)
        if not answer:
            raise ChildProcessError("a process that compiles constraints did not start")
        return child

    def _drop(self, child: Popen[bytes]) -> None:
        # A thread and `close` may both drop a child: only the one that removes it ends it.
        try:
            self.children.remove(child)
        except ValueError:
            return
        child.kill()
        with child:  # closes the pipes and waits
            pass


def _ask(child: Popen[bytes], kind: str, text: str, timeout_s: float) -> bytes:
    """Return the answer of a process, a line; empty if the process has ended. Raises TimeoutError."""
    assert child.stdin is not None
    assert child.stdout is not None
    poll = select.poll()
    poll.register(child.stdout, select.POLLIN)
    answer = b""
    with suppress(BrokenPipeError):
        child.stdin.write(json.dumps({"kind": kind, "text": text}).encode() + b"\n")
        if not poll.poll(1000 * timeout_s):
            raise TimeoutError
        answer = child.stdout.readline()
    return answer if answer.endswith(b"\n") else b""


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
