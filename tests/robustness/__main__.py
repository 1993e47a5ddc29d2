"""What attacks and kills a mesh, at full length: scripts/robustness NAME [--help] [OPTION ...]

fuzz         mutated inputs for every process
chaos        processes, links and disks fail under load; answers are compared with those of a calm mesh
abuse        attacks beside an interactive caller, or hostile tenants beside a quiet one
jobs         offline jobs beside those of a hostile tenant (isolation), and killed processes (kills)
fairness     shares of two tenants when one floods two gateways and two batchers
soak         memory of every process over 100,000 requests and more
connections  memory and processor time of a connection without credentials

Each is a module here with `add_options` and a coroutine `main`, which may return an exit code. The test suite has short
runs of each.
"""

import argparse
import sys
from importlib import import_module
from typing import Final

import uvloop

COMMANDS: Final = ("fuzz", "chaos", "abuse", "jobs", "fairness", "soak", "connections")


def main(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    if not arguments or arguments[0] not in COMMANDS:
        print(__doc__, file=sys.stderr)
        return 2
    name = arguments[0]
    module = import_module(f"tests.robustness.{name}")
    parser = argparse.ArgumentParser(
        prog=f"scripts/robustness {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    module.add_options(parser)
    return int(uvloop.run(module.main(parser.parse_args(arguments[1:]))) or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
