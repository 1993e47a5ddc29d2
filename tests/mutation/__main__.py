"""Changes guards one at a time, and says which changes no test notices: scripts/mutate.

`tests.mutation.operators` has what is changed, `tests.mutation.targets` where. Each mutant meets the tests that run its
line, the fastest first, until one fails. Which lines tests run, and which test killed a mutant, is kept by content in
.sluice/mutation.
"""

import argparse
import hashlib
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from tests.mutation.operators import Mutant, mutants_of
from tests.mutation.targets import ROOT, SUITE, Suite

START_S: Final = 8.0
"""A test may take this long, and `TIMES` as long as it took before; longer is as if it failed."""
TIMES: Final = 5
TRACE_S: Final = 1200.0
OUTPUT_SHOWN: Final = 20_000
EQUIVALENT_MAX: Final = 0.05
"""More of all mutants are not named equivalent."""


class Failed(Exception):
    """The run cannot go on; the message says why."""


@dataclass
class Coverage:
    """What tests run: of each its time in seconds, and lines by file."""

    tests: dict[str, dict[str, Any]] = field(default_factory=dict)

    def of(self, mutant: Mutant, near: tuple[str, ...]) -> list[str]:
        """The tests ``near`` that run the line of ``mutant``, or one that uses what it changes; the fastest first."""
        first, last = mutant.lines
        wanted = set(range(first, last + 1)) if mutant.function else set(mutant.used)
        lines = {
            name: test["lines"].get(mutant.file, ())
            for name, test in self.tests.items()
            if name.startswith(near)
        }
        found = [name for name, ran in lines.items() if not wanted.isdisjoint(ran)]
        if not found and not mutant.function:
            found = list(lines)
        return sorted(found, key=lambda name: self.tests[name]["s"])

    def limits_s(self, tests: Iterable[str]) -> list[float]:
        return [START_S + TIMES * self.tests[one]["s"] for one in tests]


class Process:
    """One `tests.mutation.worker`."""

    def __init__(self, suite: Suite, tests: Sequence[str]) -> None:
        ours, theirs = os.pipe(), os.pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - until `close`
        arguments = [str(ours[0]), str(theirs[1]), *suite.options, *tests]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutation.worker", *arguments],
            cwd=suite.root,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            pass_fds=(ours[0], theirs[1]),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._commands = os.fdopen(ours[1], "w", encoding="utf-8")
        self._answers = os.fdopen(theirs[0], encoding="utf-8")
        self.tests: list[str] = self._answer()["tests"]

    def ask(self, **command: Any) -> dict[str, Any]:
        print(json.dumps(command), file=self._commands, flush=True)
        return self._answer()

    def close(self) -> None:
        self._commands.close()
        self._answers.close()
        self._process.wait()
        self._output.close()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "a process ended"}
        if "error" in answer:
            self._output.seek(0)
            said = self._output.read()[-OUTPUT_SHOWN:].decode(errors="replace")
            raise Failed(f"{answer['error']}\n{said}")
        return answer


def all_mutants(suite: Suite) -> list[Mutant]:
    """Of all files of ``suite``."""
    return [
        mutant
        for file, names in suite.files.items()
        for mutant in mutants_of(file, (suite.root / file).read_text(encoding="utf-8"), names)
    ]


def equivalent(suite: Suite) -> dict[tuple[str, str, str, str, int], str]:
    """What no test can notice, with the reasons."""
    if not suite.equivalent.exists():
        return {}
    listed = tomllib.loads(suite.equivalent.read_text(encoding="utf-8"))["equivalent"]
    return {
        (one["file"], one["where"], one["was"], one["becomes"], one.get("number", 0)): one["why"]
        for one in listed
    }


def covered(suite: Suite, process: Process) -> Coverage:
    """What the tests run; only those of files that have changed are run."""
    folder = suite.root / ".sluice" / "mutation"
    folder.mkdir(parents=True, exist_ok=True)
    changed = hashlib.sha256()
    for file in suite.files:
        changed.update((suite.root / file).read_bytes())
    coverage, by_file = Coverage(), dict[str, list[str]]()
    for test in process.tests:
        by_file.setdefault(test.partition("::")[0], []).append(test)
    for file, tests in by_file.items():
        content = changed.copy()
        content.update((suite.root / file).read_bytes())
        kept = folder / f"{content.hexdigest()[:32]}.json"
        if not kept.exists():
            print(f"lines of {file}", file=sys.stderr)
            answer = process.ask(
                trace=tests, files=list(suite.files), to=str(kept), limit_s=TRACE_S
            )
            if not kept.exists():
                raise Failed(f"{file}: {answer['outcome']} while its lines were found")
        coverage.tests.update(json.loads(kept.read_text(encoding="utf-8")))
    failed = [name for name, test in coverage.tests.items() if not test["passed"]]
    if failed:
        for kept in folder.glob("*.json"):  # what failed once may pass the next time
            if not all(one["passed"] for one in json.loads(kept.read_text()).values()):
                kept.unlink()
        raise Failed(f"tests fail without a mutant: {', '.join(failed)}")
    return coverage


class Killed:
    """Mutants that a test has noticed: they are not tried again while their file and that of the test are the same."""

    def __init__(self, suite: Suite, *, again: bool) -> None:
        """``again``: what is known is forgotten."""
        self._digests = dict[str, str]()
        """Of files as they are when the run begins."""
        for path in (*suite.files, *suite.tests):
            for file in [suite.root / path, *(suite.root / path).rglob("test_*.py")]:
                if file.is_file():
                    name, content = str(file.relative_to(suite.root)), file.read_bytes()
                    self._digests[name] = hashlib.sha256(content).hexdigest()
        self._file = suite.root / ".sluice" / "mutation" / "killed"
        self._known = dict[str, str]()
        if again:
            self._file.unlink(missing_ok=True)
        if self._file.exists():
            lines = self._file.read_text(encoding="utf-8").splitlines()
            self._known = dict(line.split(" ", 1) for line in lines)

    def by(self, mutant: Mutant) -> str:
        """The test; empty: it is not known."""
        found = self._known.get(self._name(mutant), "")
        test, _, content = found.rpartition(" ")
        return test if test and content == self._content(test) else ""

    def add(self, mutant: Mutant, test: str) -> None:
        """``test`` has noticed it."""
        name, found = self._name(mutant), f"{test} {self._content(test)}"
        if self._known.get(name) != found:
            self._known[name] = found
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                print(name, found, file=file)

    def _name(self, mutant: Mutant) -> str:
        named = f"{mutant.key} {self._digests[mutant.file]}"
        return hashlib.sha256(named.encode()).hexdigest()[:32]

    def _content(self, test: str) -> str:
        return self._digests.get(test.partition("::")[0], "")[:32]


@contextmanager
def processes(suite: Suite, tests: Sequence[str], count: int) -> Iterator[list[Process]]:
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            found.append(Process(suite, tests))
            stack.callback(found[-1].close)
        yield found


def tried(
    suite: Suite, mutants: Sequence[Mutant], jobs: int, killed: Killed
) -> Iterator[tuple[Mutant, dict[str, Any]]]:
    """Each mutant with what came of it, in the order in which they end."""
    for mutant in mutants:
        if by := killed.by(mutant):
            yield mutant, {"outcome": "killed", "by": by, "s": 0.0}
    mutants = [mutant for mutant in mutants if not killed.by(mutant)]
    if not mutants:
        return
    tests = dict.fromkeys(test for one in mutants for test in suite.tests_of(one.file))
    with processes(suite, list(tests), jobs) as running:
        coverage = covered(suite, running[0])
        waiting, done = queue.SimpleQueue[Mutant](), queue.SimpleQueue[Any]()
        for mutant in mutants:
            waiting.put(mutant)

        def work(process: Process) -> None:
            try:
                while not waiting.empty():
                    mutant = waiting.get_nowait()
                    near = coverage.of(mutant, suite.tests_of(mutant.file))
                    answer = {"outcome": "not run", "by": "", "s": 0.0}
                    if near:
                        named = (mutant.file, suite.files[mutant.file], mutant.at)
                        limits_s = coverage.limits_s(near)
                        answer = process.ask(mutant=named, tests=near, limits_s=limits_s)
                    done.put((mutant, answer))
            except queue.Empty:
                pass
            except Failed as error:
                done.put(error)

        threads = [threading.Thread(target=work, args=(one,), daemon=True) for one in running]
        for thread in threads:
            thread.start()
        for _ in mutants:
            found = done.get()
            if isinstance(found, Failed):
                raise found
            if found[1]["outcome"] == "killed" and found[1]["by"]:
                killed.add(found[0], found[1]["by"])
            yield found


def main(arguments: Sequence[str] | None = None, suite: Suite = SUITE) -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__.split("\n")[0])
    parser.add_argument("--sample", type=int, metavar="N", help="so many, drawn from all")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draw")
    parser.add_argument("--files", nargs="+", default=[""], metavar="PATH", help="of these alone")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes; 2 unless told")
    parser.add_argument("--again", action="store_true", help="also those that are known as killed")
    parser.add_argument("--list", action="store_true", help="names the mutants and runs none")
    parser.add_argument("--json", action="store_true", help="ends with one line of JSON")
    given = parser.parse_args(arguments)
    every = all_mutants(suite)
    allowed = equivalent(suite)
    if unknown := set(allowed) - {one.key for one in every}:
        parser.error(f"{suite.equivalent} names mutants that do not exist: {sorted(unknown)}")
    if len(allowed) > EQUIVALENT_MAX * len(every):
        parser.error(f"{suite.equivalent} names {len(allowed)} of {len(every)}: too many")
    mutants = [one for one in every if one.key not in allowed]
    mutants = [one for one in mutants if one.file.startswith(tuple(given.files))]
    if given.sample is not None and given.sample < len(mutants):
        mutants = random.Random(given.seed).sample(mutants, given.sample)
    if given.list:
        print(*mutants, sep="\n")
        return 0
    survivors = list[Mutant]()
    counts = Counter[str]()
    try:
        outcomes = tried(suite, mutants, given.jobs, Killed(suite, again=given.again))
        for number, (mutant, answer) in enumerate(outcomes, start=1):
            counts[answer["outcome"]] += 1
            said = f"{answer['outcome']} {answer['s']:.1f} s {answer['by']}"
            print(f"{number}/{len(mutants)} {mutant}: {said}", file=sys.stderr, flush=True)
            if answer["outcome"] in ("survived", "not run"):
                survivors.append(mutant)
    except Failed as error:
        print(error, file=sys.stderr)
        return 2
    survivors.sort(key=lambda one: (one.file, one.at))
    for mutant in survivors:
        print(f"survived: {mutant}")
    killed = counts["killed"] + counts["timeout"]
    print(f"{killed} of {len(mutants)} killed; {len(allowed)} of all {len(every)} are equivalent")
    if given.json:
        named = [str(one) for one in survivors]
        print(json.dumps({"mutants": len(mutants), "killed": killed, "survivors": named}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
