"""Faults: a mesh under load is broken again and again, and every answer is compared with that of a calm mesh.

For each fault a mesh of its own is started: NATS, Triton with the small tier, batcher and gateway, as `sluice up` runs
them. Callers ask the same questions in a closed loop (temperature 0.8, each question with its seed; every second answer
has 160 tokens), one fault follows the other, and one line says what the callers saw:

    n           faults
    answers     calls that ended with exactly the tokens and the text of the calm mesh
    diff        calls whose tokens or text are others
    lost        calls that ended with OK but with fewer tokens, or that had not ended 5 s after their deadline (hung)
    twice       calls to which a token was delivered twice
    failed      calls that ended with an error; the next line counts them by code and reason of ErrorInfo
    gap max     longest time between two events of a call; its begin and its end count as events
    p99         99th percentile over calls of the longest gap of each
    full rate   from the fault until callers get 80 % of the tokens a second of the calm time before the first fault

    scripts/robustness chaos [--faults batcher-kill,nats-stop] [--seconds 180] [--every 10] [--callers 32] [--json]
        [--gateways N] [--batchers N] [--workers N] [--standby N] [--nats 1|3] [--client sdk|plain]
        [--limit 30] [--keep DIR]

The exit code is 1 when an answer was different, lost or doubled, or when a fault could not be done.
docs/concepts/faults.md has the figures and says what each process promises; `--list` names the faults.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain, count
from pathlib import Path
from typing import Final

from sluice.errors import SetupError
from tests.robustness.faults.callers import KINDS
from tests.robustness.faults.mesh import Missing, Topology
from tests.robustness.faults.registry import FAULTS
from tests.robustness.faults.results import HEADER, shown
from tests.robustness.faults.run import CalmAnswers, Plan, run_fault

DEFAULT: Final = tuple(
    f"{process}-{what}"
    for what in ("kill", "stop")
    for process in ("worker", "triton", "batcher", "gateway", "nats")
)


async def main(options: argparse.Namespace) -> int:
    """Run the faults; return 1 if one could not be done or an answer was not the calm one."""
    if options.list:
        print("\n".join(f"{name:24} {fault.about}" for name, fault in FAULTS.items()))
        return 0
    topology = Topology(
        options.gateways, options.batchers, options.workers, options.standby, options.nats
    )
    plan = Plan(
        topology, options.client, options.callers, options.seconds, options.every, options.limit
    )
    calm, code = CalmAnswers(), 0
    if not options.json:
        print(HEADER, flush=True)
    with _folder(options.keep) as root:
        for name in options.faults:
            try:
                line = await run_fault(name, plan, calm, _unused(root / name))
            except (Missing, SetupError) as error:
                _report(options.json, {"fault": name, "skipped": str(error)}, f"{name}: {error}")
                code = 1
                continue
            _report(options.json, asdict(line), shown(line))
            code = code if line.exact else 1
    return code


def _report(as_json: bool, values: dict[str, object], text: str) -> None:
    print(json.dumps(values) if as_json else text, flush=True)


@contextmanager
def _folder(named: Path | None) -> Iterator[Path]:
    """``named``, which stays, or one that goes."""
    if named is not None:
        yield named.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="sluice-chaos-") as folder:
        yield Path(folder)


def _unused(folder: Path) -> Path:
    """``folder``, or with a number when it is there already: a mesh would find what another one stored."""
    numbered = (folder.with_name(f"{folder.name}.{number}") for number in count(1))
    return next(path for path in chain([folder], numbered) if not path.exists())


def _names(text: str) -> list[str]:
    names = list(FAULTS) if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in FAULTS]:
        raise argparse.ArgumentTypeError(
            f"no fault {', '.join(unknown)}; there are: all, {', '.join(FAULTS)}"
        )
    return names


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--faults", type=_names, default=list(DEFAULT), help="names, or all")
    parser.add_argument("--list", action="store_true", help="name all faults and end")
    parser.add_argument("--seconds", type=float, default=180.0, help="length of the run of a fault")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two faults")
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--client", choices=list(KINDS), default="sdk")
    parser.add_argument("--limit", type=float, default=30.0, help="deadline of each call, seconds")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--batchers", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="Triton processes with the model")
    parser.add_argument("--standby", type=int, default=0, help="of the workers, standbys")
    parser.add_argument("--nats", type=int, choices=(1, 3), default=1)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep files and logs there")
