"""Inject faults into product files and count how many the tests notice: scripts/mutate.

cosmic-ray changes the code: one operator at one place, in a copy of the checkout. A fault is noticed when a test that
imports its module fails, else when one of the tests of its package fails. It is not judged if they fail without it too.
Two trees are compared with one seed; each is tested by the interpreter of its own .venv, if it has one:

    scripts/mutate --sample 100 --seed 7
    scripts/mutate --sample 100 --seed 7 --tree ../before
"""

import argparse
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.plugins import get_operator, operator_names
from cosmic_ray.work_item import MutationSpec, TestOutcome

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = (
    *("batcher", "cli", "gateway", "jobs", "learning", "model_workers", "simulator", "sluice"),
    "supervisor",
)
GENERATED: Final = ("sluice/v1/", "sluice/internal/", "sluice/client/blocking.py")
OPERATORS: Final = re.compile(
    r"core/(AddNot|Replace(True|False|And|Or|Break|Continue)With\w+|NumberReplacer"
    r"|ZeroIterationForLoop|ExceptionReplacer|ReplaceUnaryOperator_Delete_Not"
    r"|ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Mod_Sub)"
    r"|ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is"
    r"|Lt_(LtE|GtE)|LtE_(Lt|Gt)|Gt_(GtE|LtE)|GtE_(Gt|Lt)))"
)
"""The operators that make a fault a person could make. Those on `|` would change annotations."""
TIMEOUT_S: Final = 300.0
"""Timeout of the tests of one fault, in seconds: a fault that makes them hang is noticed."""


def product_files(tree: Path) -> list[str]:
    """Return the tracked product files, generated ones excluded."""
    listing = subprocess.run(
        ["git", "ls-files", *(f"{package}/*.py" for package in PACKAGES)],
        cwd=tree,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listing.stdout.split() if not name.startswith(GENERATED)]


def faults_in(tree: Path, file: str) -> list[MutationSpec]:
    """Return every fault that can be injected into a file."""
    nodes = list(ast_nodes(get_ast_from_path(tree / file)))
    faults = []
    for name in filter(OPERATORS.fullmatch, operator_names()):
        operator = get_operator(name)()
        places = [place for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, (start, end) in enumerate(places):
            faults.append(MutationSpec(file, name, occurrence, start, end))
    return faults


def draw(tree: Path, prefixes: Sequence[str], count: int, seed: int) -> list[MutationSpec]:
    """Draw faults: a file by its size, then one of its faults."""
    chance = random.Random(seed)
    files = [name for name in product_files(tree) if name.startswith(tuple(prefixes))]
    weights = [(tree / name).stat().st_size for name in files]
    faults: dict[tuple[str, str, int], MutationSpec] = {}
    for file in chance.choices(files, weights, k=10 * count):
        if len(faults) < count and (possible := faults_in(tree, file)):
            fault = chance.choice(possible)
            faults[file, fault.operator_name, fault.occurrence] = fault
    return list(faults.values())


def near_tests(tree: Path, file: str) -> list[str]:
    """Return the test files that import the module of `file`, and the one named after it."""
    path = Path(file)
    package, module = ".".join(path.parts[:-1]), path.stem
    imports = rf"(from|import) {package}\.{module}\b|from {package} import .*\b{module}\b"
    listing = subprocess.run(
        ["git", "grep", "-lE", imports, "--", "tests/**/test_*.py"],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    mirrored = Path("tests") / path.parent / f"test_{module}.py"
    found = [*listing.stdout.split(), *([str(mirrored)] if (tree / mirrored).exists() else [])]
    return list(dict.fromkeys(found))


def folder_of_tests(tree: Path, file: str) -> str:
    """Return the deepest folder of tests that mirrors the package of `file`."""
    folder = Path("tests") / Path(file).parent
    while not (tree / folder).is_dir():
        folder = folder.parent
    return str(folder)


def is_noticed(tree: Path, python: str, fault: MutationSpec) -> bool | None:
    """Inject a fault into `tree`, run its tests, and take it out again; None: they fail without it too."""
    file = str(fault.module_path)
    injected = MutationSpec(
        tree / file, fault.operator_name, fault.occurrence, fault.start_pos, fault.end_pos
    )
    for tests in (near_tests(tree, file), [folder_of_tests(tree, file)]):
        command = (
            f"env -C {tree} PYTHONPATH={tree} HF_HUB_OFFLINE=1 {python} -m pytest"
            f" -x -q -m 'not long' {' '.join(tests)}"
        )
        if not tests:
            continue
        outcome = mutate_and_test([injected], command, TIMEOUT_S).test_outcome
        # Bytecode of the fault would stand for the file: both may have one size and one second of change.
        shutil.rmtree((tree / file).parent / "__pycache__", ignore_errors=True)
        if outcome not in (TestOutcome.SURVIVED, None):
            bounded = ("timeout", str(TIMEOUT_S), *shlex.split(command))
            unchanged = subprocess.run(bounded, stdout=subprocess.DEVNULL, check=False)
            return True if unchanged.returncode == 0 else None
    return False


@contextmanager
def copies(tree: Path, count: int) -> Iterator[SimpleQueue[Path]]:
    """Copy the checkout `count` times; each copy takes one fault at a time."""
    free: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="sluice-mutation-") as folder:
        for number in range(count):
            copy = Path(folder) / str(number)
            shutil.copytree(
                tree, copy, ignore=shutil.ignore_patterns(".venv", ".*_cache", "__pycache__")
            )
            free.put(copy)
        yield free


def main() -> int:
    """Draw faults, run the tests of each, and print those that no test noticed."""
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sample", type=int, default=100, metavar="N", help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--files", nargs="+", default=[""], metavar="PATH", help="prefixes")
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="faults at a time")
    parser.add_argument("--list", action="store_true", help="print the faults and run no test")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    tree = options.tree.resolve()
    faults = draw(tree, options.files, options.sample, options.seed)
    if options.list:
        print("\n".join(map(_described, faults)))
        return 0
    own = tree / ".venv/bin/python"
    python = str(own) if tree != ROOT and own.exists() else sys.executable
    counts, survivors = Counter[str](), []
    with copies(tree, options.jobs) as free, ThreadPoolExecutor(options.jobs) as pool:

        def run(fault: MutationSpec) -> bool | None:
            copy = free.get()
            try:
                return is_noticed(copy, python, fault)
            finally:
                free.put(copy)

        for fault, noticed in zip(faults, pool.map(run, faults), strict=True):
            word = {True: "noticed", False: "SURVIVED", None: "FAILS"}[noticed]
            print(f"{word:8} {_described(fault)}", flush=True)
            counts[word] += 1
            survivors += [_described(fault)] if noticed is False else []
    judged = len(faults) - counts["FAILS"]
    print(f"{counts['noticed']} of {judged} noticed (seed {options.seed})")
    if judged < len(faults):
        print(f"{len(faults) - judged} not judged (FAILS): their tests fail without the fault too")
    if options.json:
        print(json.dumps({"faults": judged, "seed": options.seed, "survivors": survivors}))
    return 0


def _described(fault: MutationSpec) -> str:
    line, column = fault.start_pos
    return f"{fault.module_path}:{line}:{column} {fault.operator_name.removeprefix('core/')}"


if __name__ == "__main__":
    sys.exit(main())
