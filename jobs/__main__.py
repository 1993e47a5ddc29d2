"""`python -m jobs --config FILE [--id ID]`: run jobs until SIGTERM or SIGINT, then leave them to other processes."""

import sluice.quick_start  # noqa: F401

# isort: split
import sys

from jobs.app import serve
from sluice.interpreter import freeze_heap
from sluice.process import Process, Program


async def _serve(process: Process) -> None:
    freeze_heap()
    await serve(process.settings, process.id, process.tracer, process.stop, process.instruments)


main = Program("jobs", __doc__, "jobs", _serve, has_callers=True).main

if __name__ == "__main__":
    sys.exit(main())
