"""What the shipped rule saves: the share of the large tier's tokens that it spends, and of its right answers it keeps.

    python bench/router.py [--json] [--runs N] [--n N]

`heldout_rules_token_share`: tokens of prompts and answers that the large tier computes when the rule chooses a tier for
each prompt, of those that it computes alone; peer: the rule without `max_prompt_chars`, the part of it that was tuned.
`also` has the share of the large tier's right answers, `accuracy_share`. Both tiers answer every held-out task of
`sluice eval` as a worker on a CPU computes it (float32, greedy), without a mesh; a round is a seed that no choice was
made on, with --n tasks of every kind and level.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import ROOT, Figure, emit, options_of, paired
from bench.tiers.evaluate import ServedModel
from bench.tiers.tokenizer import load_tokenizer
from gateway.routing.features import Features
from gateway.routing.rules import matches
from model_workers.tiers.example import Example
from model_workers.tiers.tasks import heldout
from sluice import settings as config

SEED: Final = 4001
"""Of the first round. 1001 to 1005 chose `max_prompt_chars`; no other held-out seed was used for it."""
MODELS: Final = ROOT / "model_workers" / "models"
WEAK, STRONG = "small", "large"

Chooses = Callable[[str], bool]
"""Whether a prompt goes to the large tier."""


@dataclass(frozen=True)
class Answered:
    """A task with what both tiers made of it: whether it was right, and the tokens of prompt and answer."""

    prompt: str
    weak_right: bool
    strong_right: bool
    strong_tokens: int


def figures(runs: int, n: int) -> list[Figure]:
    """``runs`` seeds of ``n`` tasks of every kind and level."""
    (rule,) = config.Settings().routing.rules
    untuned = rule.model_copy(update={"max_prompt_chars": None})
    tiers = _Tiers()
    rounds = [tiers.answered(heldout(n, SEED + number)) for number in range(runs)]
    shipped, before = (
        [_shares(round_, lambda text, one=one: matches(one, Features(None, text))) for round_ in rounds]  # type: ignore[misc]
        for one in (rule, untuned)
    )  # fmt: skip
    tokens, tokens_before = ([one[1] for one in side] for side in (shipped, before))
    return [
        paired(
            "heldout_rules_token_share",
            tokens,
            tokens_before,
            unit="of large's",
            higher_is_better=False,
            note=f"seeds from {SEED}, {n} tasks of every kind and level; peer: the rule without max_prompt_chars",
            also={"accuracy_share": median(one[0] for one in shipped)},
        )
    ]


def _shares(answered: Sequence[Answered], chooses: Chooses) -> tuple[float, float]:
    """Right answers of those of the large tier alone, and its tokens of those it computes alone."""
    strong = [chooses(one.prompt) for one in answered]
    right = sum(
        one.strong_right if s else one.weak_right for one, s in zip(answered, strong, strict=True)
    )
    tokens = sum(one.strong_tokens for one, s in zip(answered, strong, strict=True) if s)
    return (
        right / sum(one.strong_right for one in answered),
        tokens / sum(one.strong_tokens for one in answered),
    )


class _Tiers:
    def __init__(self) -> None:
        self._tokenizer = load_tokenizer(MODELS / STRONG)
        self._models = {
            name: ServedModel(MODELS / name, dtype="float32", quantization="none")
            for name in (WEAK, STRONG)
        }

    def answered(self, examples: list[Example]) -> list[Answered]:
        """All of them, by both tiers."""
        weak, strong = (model.answers(self._tokenizer, examples) for model in self._models.values())
        return [
            Answered(
                example.prompt,
                example.grade(small),
                example.grade(large),
                sum(len(self._tokenizer(text)["input_ids"]) for text in (example.prompt, large)),
            )
            for example, small, large in zip(examples, weak, strong, strict=True)
        ]


def main() -> None:
    """Prints the figure."""
    parser = options_of(__doc__, "seeds")
    parser.add_argument("--n", type=int, default=20, help="tasks per kind, level and round")
    options = parser.parse_args()
    emit(figures(options.runs, options.n), options.json)


if __name__ == "__main__":
    main()
