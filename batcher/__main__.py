"""`python -m batcher --config FILE [--id ID]`: run one batcher; drains on SIGTERM or SIGINT."""

import sluice.quick_start  # noqa: F401

# isort: split
import sys

from batcher.app import serve
from sluice.interpreter import freeze_heap
from sluice.process import Process, Program


async def _serve(process: Process) -> None:
    freeze_heap()
    await serve(
        process.settings,
        process.id,
        process.tracer,
        process.stop,
        process.config,
        process.instruments,
    )


main = Program("batcher", __doc__, "b", _serve, reloads=True).main

if __name__ == "__main__":
    sys.exit(main())
