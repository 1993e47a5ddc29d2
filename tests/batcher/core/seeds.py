"""Plays simulated histories: `python -m tests.batcher.core.seeds --seeds 10000`, or one again with `--seed N`."""

import argparse
import sys
import traceback
from collections.abc import Callable
from typing import Final

from tests.batcher.core.scheduler.fuzz import QueueFuzz
from tests.batcher.core.world import World

KINDS: Final[dict[str, Callable[[int], World | QueueFuzz]]] = {"world": World, "queue": QueueFuzz}


def main() -> int:
    """The exit code is 1 when a seed failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="play this one alone, with its traceback")
    parser.add_argument("--seeds", type=int, default=300, help="play so many of each kind")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--kind", choices=[*KINDS], action="append", help="default: all")
    arguments = parser.parse_args()
    first = arguments.seed if arguments.seed is not None else arguments.first
    count = 1 if arguments.seed is not None else arguments.seeds
    failed = sum(
        not plays(kind, seed)
        for kind in arguments.kind or KINDS
        for seed in range(first, first + count)
    )
    print(f"{count} seeds, {failed} failed")
    return 1 if failed else 0


def plays(kind: str, seed: int) -> bool:
    """Whether the history is as it must be; what is wrong is told at once."""
    try:
        KINDS[kind](seed).run()
    except Exception:  # Whatever goes wrong in a history is a failure of it.
        print(f"{kind} {seed}:", traceback.format_exc(), file=sys.stderr)
        print(f"again: python -m tests.batcher.core.seeds --kind {kind} --seed {seed}", flush=True)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
