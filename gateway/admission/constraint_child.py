"""Compiles constraints for a gateway, one after the other, as a process that may be killed at any time.

Its requests and answers are lines of JSON: {"kind", "text"}, then {"problem"}. It ends with its standard input, when a
constraint needs more memory than `MEMORY_BYTES`, and when one takes longer than `SECONDS`, also without its gateway.
"""

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from sluice.constraints import problem_of

MEMORY_BYTES: Final = 256 * 1024 * 1024
"""Memory that one constraint may take, beside the process itself, in bytes."""
SECONDS: Final = 2.0
"""Time that one constraint may take. The gateway kills the process then; its own alarm does a little later."""
_NICE: Final = 10
"""Priority of the process: the gateway's event loop goes first."""


def main() -> None:
    """Answer until the standard input ends."""
    os.nice(_NICE)
    # Where the kernel groups processes by session, only the group's own value counts between sessions.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICE), encoding="ascii")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    problem_of("regex", "warm-up")  # loads the libraries before the memory is counted
    pages = int(open("/proc/self/statm", encoding="ascii").read().split()[0])  # noqa: SIM115
    limit_bytes = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, 2 * SECONDS)
        problem = problem_of(request["kind"], request["text"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(json.dumps({"problem": problem}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
