"""Every split of many texts against the decision about the whole text; prints counts as one JSON object.

    python -m tests.gateway.safety.output.splits --splits 1000000 --seed 1
    python -m tests.gateway.safety.output.splits --rules package.module:function

The function of ``--rules`` gives the rules to test: ``() -> (watched rules, scanner)``.
"""

import argparse
import importlib
import json
import random
from collections.abc import Sequence

from gateway.safety.output.redactor import OutputRules
from tests.gateway.safety.output.kit import (
    PLAIN,
    SECRETS,
    check_pieces,
    random_pieces,
    random_text,
    rules_of,
    small_rules,
    whole,
)
from tests.gateway.safety.output.real import SAMPLES

_SPLITS_OF_A_TEXT = 20


def two_way(rules: OutputRules, texts: Sequence[str]) -> int:
    """All splits of each text into two; returns how many."""
    count = 0
    for text in texts:
        expected = whole(rules, text)
        for at in range(len(text) + 1):
            check_pieces(rules, [text[:at], text[at:]], expected)
            count += 1
    return count


def many_way(
    rules: OutputRules, splits: int, seed: int, samples: Sequence[str] = SECRETS
) -> dict[str, int]:
    """Random splits of random texts; returns counts."""
    rng, texts, edited = random.Random(seed), 0, 0
    for done in range(0, splits, _SPLITS_OF_A_TEXT):
        text = random_text(rng, samples)
        expected = whole(rules, text)
        for _ in range(min(_SPLITS_OF_A_TEXT, splits - done)):
            check_pieces(rules, random_pieces(text, rng), expected)
        texts += 1
        edited += bool(expected.edits)
    return {"random_splits": splits, "texts": texts, "texts_with_edits": edited}


def corpus(seed: int, size: int, samples: Sequence[str] = SECRETS) -> list[str]:
    """What every rule finds, in words, and random mixtures."""
    rng = random.Random(seed)
    framed = [f"Write to {text} or call. {text}." for text in (*samples, *PLAIN)]
    return [*samples, *PLAIN, *framed, *(random_text(rng, samples) for _ in range(size))]


def _rules(name: str) -> OutputRules:
    if not name:
        return small_rules()
    module, _, function = name.partition(":")
    watched, scanner = getattr(importlib.import_module(module), function)()
    return rules_of(watched, scanner)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--texts", type=int, default=300, help="random texts split every way in two"
    )
    parser.add_argument("--rules", default="", metavar="MODULE:FUNCTION")
    arguments = parser.parse_args()
    rules = _rules(arguments.rules)
    samples = SAMPLES if arguments.rules else SECRETS
    counts = {"two_way_splits": two_way(rules, corpus(arguments.seed, arguments.texts, samples))}
    counts |= many_way(rules, arguments.splits, arguments.seed, samples)
    print(json.dumps({"seed": arguments.seed, **counts, "differences": 0}))


if __name__ == "__main__":
    main()
