"""Plays simulated meshes: `python -m tests.simulated_mesh.seeds --seeds 10000`, or one again with `--seed N`."""

import argparse
import gc
import os
import sys
import traceback
from collections import Counter

from tests.simulated_mesh.world import World


def main() -> int:
    """The exit code is 1 when a seed failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="play this one alone, with its traceback")
    parser.add_argument("--seeds", type=int, default=100, help="play so many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    arguments = parser.parse_args()
    first = arguments.first if arguments.seed is None else arguments.seed
    count = arguments.seeds if arguments.seed is None else 1
    gc.freeze()  # Else every collection looks at what was imported.
    outcomes: Counter[str] = Counter()
    failed = sum(not plays(seed, outcomes) for seed in range(first, first + count))
    print(f"{count} seeds, {failed} failed; requests: {dict(outcomes)}")
    return 1 if failed else 0


def plays(seed: int, outcomes: Counter[str]) -> bool:
    """Whether the history is as it must be; what is wrong is told at once."""
    world = World(seed)
    try:
        world.run()
    except Exception:  # Whatever goes wrong in a history is a failure of it.
        print(f"seed {seed}:", traceback.format_exc(), file=sys.stderr)
        print(f"again: python -m tests.simulated_mesh.seeds --seed {seed}", flush=True)
        return False
    outcomes += world.outcomes
    return True


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of names have the same order in every run.
        command = [sys.executable, "-m", "tests.simulated_mesh.seeds", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
