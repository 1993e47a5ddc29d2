"""Measures the figures of docs/internals/benchmarks.md, keeps their lines in bench/results, and writes the pages.

    scripts/figures [--list] [--runs N] [--then CHECKOUT] [PART ...]         all but the tails
    scripts/figures tails [--list] [--runs N] [PART ...]                     percentiles in open loop
    scripts/figures --pages                                                  measures nothing

--then names a checkout of 944fd4c with a complete .venv of its own; without it the figures against it are not measured.
Published are figures of one clean commit and at least `ROUNDS` rounds: a changed tree is refused, and --runs 1 prints
and keeps nothing. At the end it says which figures differ from the last page by more than their intervals.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from bench.support.harness import ROOT, ROUNDS, commit, run_count
from bench.support.pages import load_results, processor, read_lines, render, shown

Parts = Mapping[str, tuple[str, ...]]
FIGURES: Final[Parts] = {
    "requests": ("against", "requests", "tokens", "idle"),
    "proxies": ("api",),
    "share": ("mesh", "engine_share"),
    "echo": ("mesh", "echo"),
    "traced": ("telemetry",),
    "jobs": ("jobs", "throughput"),
    "engine-float32": ("engine", "--dtype", "float32"),
    "engine": ("engine",),
    "simulation": ("simulation", "--model", "small"),
    "router": ("router",),
    "chat": ("chat",),
    "openai": ("remote",),
    "policies": ("policies",),
    "admission": ("admission",),
}
TAILS: Final[Parts] = {
    "open-loop": ("tails", "open_loop"),
    "bulk": ("tails", "bulk"),
    "job": ("jobs", "interactive"),
}
"""By name: a benchmark, and the options that make the part."""
AGAINST: Final = "against"

RESULTS: Final = ROOT / "bench" / "results"
FILE: Final = RESULTS / "figures.jsonl"
PAGES: Final = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    parts = TAILS if options.tails else FIGURES
    if options.list:
        print("\n".join(f"{name:16} sluice bench {' '.join(part)}" for name, part in parts.items()))
        return 0
    failed = []
    if not options.pages:
        before = {name: list(lines) for name, lines in load_results(RESULTS).items()}
        failed = [name for name in options.part or parts if _fails(parts[name], options)]
        print("\n".join(differences(before, load_results(RESULTS))))
    write_pages()
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="the parts, and what each runs")
    parser.add_argument("--pages", action="store_true", help="only write the pages")
    parser.add_argument("--then", type=Path, metavar="CHECKOUT", help="a checkout of 944fd4c")
    parser.add_argument("--runs", type=run_count, default=ROUNDS, help="rounds of each figure")
    parser.add_argument("part", nargs="*", metavar="PART")
    options = parser.parse_args(arguments)
    options.tails = options.part[:1] == ["tails"]
    del options.part[: options.tails]
    parts = TAILS if options.tails else FIGURES
    for name in options.part:
        if name not in parts:
            parser.error(f"no part {name!r}; there are {', '.join(parts)}")
    if not (options.list or options.pages or options.runs < ROUNDS) and commit().endswith("+"):
        parser.error(f"{commit()}: figures are of a commit, and files have been changed since")
    return options


def _fails(part: tuple[str, ...], options: argparse.Namespace) -> bool:
    """Runs one part, which prints what it does; whether it failed."""
    benchmark, *rest = part
    if benchmark == AGAINST:
        if options.then is None:
            print("against: --then CHECKOUT is missing", file=sys.stderr)
            return True
        rest.insert(0, str(options.then.resolve()))
    command = [sys.executable, str(ROOT / "bench" / f"{benchmark}.py"), "--json", *rest]
    command += ["--runs", str(options.runs)]
    print(" ".join(command[1:]), file=sys.stderr, flush=True)
    begun = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(f"  {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for line in found:
        if line.get("ours") is None or options.runs < ROUNDS:
            print(f"{line['figure']}: {line['ratio']}: {line['note']}", file=sys.stderr)
    if options.runs >= ROUNDS:
        keep(FILE, found)
    return bool(done.returncode)


def keep(path: Path, found: Iterable[Mapping[str, Any]]) -> None:
    """Puts lines into a file, each in the place of the one of the same figure and processor; missing peers replace
    nothing."""
    lines = {(line["figure"], processor(line)): line for line in read_lines(path)}
    lines |= {
        (line["figure"], processor(line)): dict(line)
        for line in found
        if line.get("ours") is not None
    }
    text = "".join(json.dumps(line) + "\n" for line in lines.values())
    path.write_text(text, encoding="utf-8")


Results = Mapping[str, Iterable[Mapping[str, Any]]]


def differences(before: Results, after: Results) -> Iterable[str]:
    """A sentence for each figure whose interval lies outside of the one that it had on the same processor."""
    for name, lines in after.items():
        for line in lines:
            for old in before.get(name, ()):
                same = processor(old) == processor(line) and old.get("ratio") is not None
                if same and (_low(line) > _high(old) or _high(line) < _low(old)):
                    yield f"{name}: {shown(old['ratio'])} at {old['commit']}, now {shown(line['ratio'])}"


def _low(line: Mapping[str, Any]) -> float:
    return float(line["ratio"] if line.get("low") is None else line["low"])


def _high(line: Mapping[str, Any]) -> float:
    return float(line["ratio"] if line.get("high") is None else line["high"])


def write_pages() -> None:
    """Writes the numbers of bench/results into the pages."""
    results = load_results(RESULTS)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(render(text, results), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
