"""Runs parts of the benchmarks, keeps their lines in bench/results, and writes the numbers into the pages.

    scripts/bench [--list] [--runs N] [--pages] [--outcomes FILE ...] [PART ...]

Without a PART all of them, in the order of `PARTS`; that takes hours, and an otherwise idle machine. --pages measures
nothing and writes what bench/results holds into README.md and docs.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from bench.support.harness import ROOT, run_count
from bench.support.pages import load_results, read_lines, render

PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "mesh": ("mesh",),
    "request-cost": ("mesh", "request_cost"),
    "interactive": ("mesh", "interactive_beside_bulk"),
    "open-loop": ("mesh", "openloop_ttft"),
    "secured": ("mesh", "secured_vs_open", "tls_vs_plain"),
    "processes": ("processes",),
    "plan": ("plan",),
    "http": ("api", "http_vs_grpc"),
    "http-litellm": ("api", "http_vs_litellm"),
    "http-smg": ("api", "http_vs_smg"),
    "engine": ("engine",),
    "engine-float32": ("engine", "--dtype", "float32"),
    "batcher": ("batcher",),
    "safety-input": ("safety", "--only", "input"),
    "safety-output": ("safety", "--only", "output"),
    "safety-mesh": ("safety", "--only", "mesh"),
    "router-decision": ("router", "--decision"),
    "router-rules": ("router", "--rules"),
    "router-tiers": ("router", "--tiers", "--plot", "docs/concepts/strategies.png"),
    "router-outcomes": ("router",),
    "telemetry": ("telemetry",),
    "simulation": ("simulation",),
    "jobs-throughput": ("jobs", "throughput"),
    "jobs-interactive": ("jobs", "interactive"),
}
"""By name: a benchmark, and the options that make the part."""
OUTCOMES: Final = "router-outcomes"
"""The part that needs files, which are not in this repository; without --outcomes it is left out."""

RESULTS: Final = ROOT / "bench" / "results"
PAGES: Final = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    if options.list:
        print("\n".join(f"{name:16} sluice bench {' '.join(part)}" for name, part in PARTS.items()))
        return 0
    failed = [] if options.pages else [name for name in _parts(options) if _fails(name, options)]
    write_pages()
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="the parts, and what each runs")
    parser.add_argument("--pages", action="store_true", help="only write the pages")
    parser.add_argument("--outcomes", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--runs", type=run_count, help="of each figure")
    parser.add_argument("part", nargs="*", metavar="PART")
    options = parser.parse_args(arguments)
    for name in options.part:
        if name not in PARTS:
            parser.error(f"no part {name!r}; there are {', '.join(PARTS)}")
        if name == OUTCOMES and not options.outcomes:
            parser.error(f"{name} needs --outcomes FILE")
    return options


def _parts(options: argparse.Namespace) -> list[str]:
    return [name for name in options.part or PARTS if name != OUTCOMES or options.outcomes]


def _fails(name: str, options: argparse.Namespace) -> bool:
    """Runs one part, which prints what it does; whether it failed."""
    benchmark, *rest = PARTS[name]
    for path in options.outcomes if name == OUTCOMES else ():
        rest += ["--outcomes", str(path.resolve())]
    command = [sys.executable, str(ROOT / "bench" / f"{benchmark}.py"), "--json", *rest]
    command += ["--runs", str(options.runs)] if options.runs is not None else []
    print(f"{name}: {' '.join(command[1:])}", file=sys.stderr, flush=True)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for line in found:
        if line.get("ours") is None:
            print(f"{line['figure']}: not measured: {line['note']}", file=sys.stderr)
    keep(RESULTS / f"{benchmark}-cpu-{os.cpu_count()}-cores.jsonl", found)
    return bool(done.returncode)


def keep(path: Path, found: Iterable[Mapping[str, Any]]) -> None:
    """Puts lines into a file, each in the place of the one with the same figure; missing peers replace nothing."""
    lines = {line["figure"]: line for line in read_lines(path)}
    lines |= {line["figure"]: dict(line) for line in found if line.get("ours") is not None}
    text = "".join(json.dumps(line) + "\n" for line in lines.values())
    path.write_text(text, encoding="utf-8")


def write_pages() -> None:
    """Writes the numbers of bench/results into the pages."""
    results = load_results(RESULTS)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(render(text, results), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
