"""`sluice bench NAME`: runs a benchmark of the source tree, bench/NAME.py."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import typer
from typer import Argument, Option

from cli.commands import wants_json
from cli.failure import CommandFailed

FOLDER: Final = Path(__file__).parents[1] / "bench"
"""Only a source tree has it: benchmarks compare with peers that a user of the mesh does not need."""


def benchmark_names() -> list[str]:
    """Return the names of the benchmarks of this source tree."""
    return sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "__init__")


CONTEXT_SETTINGS: Final = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Options that only one benchmark has go to it as they are."""


def bench(
    context: typer.Context,
    name: str = Argument(
        ..., help=f"One of: {', '.join(benchmark_names()) or 'none, this is no source tree'}."
    ),
    runs: int | None = Option(None, help="Interleaved runs of both sides.", min=1),
) -> None:
    """Run a benchmark of the source tree beside a peer.

    Options that it has of its own: python bench/NAME.py --help.
    """
    options = ["--runs", str(runs)] if runs is not None else []
    options += ["--json"] if wants_json() else []
    run(name, *options, *context.args)


def run(name: str, *options: str, stdout: int | None = None) -> str:
    """Run a benchmark and return its output if `stdout` is `subprocess.PIPE`, else an empty text.

    Raises:
        CommandFailed: there is none of that name, or it fails.
    """
    names = benchmark_names()
    if name not in names:
        there = f"there are: {', '.join(names)}" if names else f"no benchmarks in {FOLDER}"
        raise CommandFailed("BENCHMARK_UNKNOWN", f"no benchmark {name!r}; {there}")
    command = [sys.executable, str(FOLDER / f"{name}.py"), *options]
    # Benchmarks fork while gRPC threads run, which gRPC would log each time.
    environment = {"GRPC_VERBOSITY": "ERROR", **os.environ}
    ran = subprocess.run(command, env=environment, check=False, stdout=stdout, text=True)
    if ran.returncode:
        raise CommandFailed(
            "BENCHMARK_FAILED", f"bench/{name}.py ended with exit code {ran.returncode}"
        )
    return ran.stdout or ""
