"""Counts resumed answers that differ: ``python -m tests.model_workers.engine.generate.resumes [MODEL]``.

Prompts of the support desk are answered greedily in batches. Then each answer is continued behind a part of its tokens,
as another worker would. `docs/use/engines.md` has the counts.
"""

import argparse
import logging
import sys

from gateway.config.models import ModelFolder
from model_workers.engine.generate.engine import GenerateEngine
from model_workers.engine.generate.load import load_generate
from model_workers.engine.protocol import Sampling, SequenceSpec
from model_workers.tiers.tasks import heldout
from sluice.settings import ModelSettings

PARTS = (0.25, 0.5, 0.75)


def rows_of(settings: ModelSettings, count: int, tokens: int) -> list[SequenceSpec]:
    """Return a sequence for each prompt."""
    tokenizer = ModelFolder(settings).tokenizer
    prompts = [example.prompt for example in heldout(-(-count // 7), 11)[:count]]
    sampling = Sampling(tokens)
    return [
        SequenceSpec(str(n), "b", 0, tuple(tokenizer.encode_text(prompt)), (), sampling)
        for n, prompt in enumerate(prompts)
    ]


def answers(engine: GenerateEngine, sequences: list[SequenceSpec]) -> dict[str, list[int]]:
    """Compute all sequences; returns their answers, tokens of earlier attempts included."""
    found = {sequence.request_id: list(sequence.produced) for sequence in sequences}
    for sequence in sequences:
        engine.add(sequence, 0.0)
    while engine.has_sequences():
        for step in engine.step(0.0):
            found[step.request_id] += step.token_ids
    return found


def differing(engine: GenerateEngine, sequences: list[SequenceSpec]) -> tuple[int, int]:
    """Return how many resumed answers differ, and how many there were."""
    whole, wrong, total = answers(engine, sequences), 0, 0
    for part in PARTS:
        again = []
        for sequence in sequences:
            held = tuple(whole[sequence.request_id][: int(part * len(whole[sequence.request_id]))])
            again.append(
                SequenceSpec(
                    sequence.request_id, sequence.owner, 1, sequence.prompt, held, sequence.sampling
                )
            )
        resumed = answers(engine, again)
        wrong += sum(resumed[name] != whole[name] for name in whole)
        total += len(whole)
    return wrong, total


def main() -> int:
    """Print a line for each number format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="builtin:large")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=60)
    options = parser.parse_args()
    logging.disable()
    for dtype in ("float32", "bfloat16"):
        settings = ModelSettings(
            name="m", path=options.model, engine="generate", dtype=dtype, device="cpu"
        )
        engine = load_generate(settings)
        wrong, total = differing(engine, rows_of(settings, options.sequences, options.tokens))
        print(f"{options.model}, {dtype}: {wrong} of {total} resumed answers differ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
