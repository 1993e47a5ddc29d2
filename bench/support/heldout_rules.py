"""The shipped rule on held-out tasks of seeds that no choice was made on, without a mesh.

Both tiers answer every task as a worker on a CPU computes it (float32, greedy); the rule chooses one of the answers by
the prompt. The peer is the rule without `max_prompt_chars`, the part of it that was tuned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from bench.support.harness import ROOT, Figure, machine
from bench.support.tier_runs import STRONG, WEAK
from bench.tiers.evaluate import ServedModel
from bench.tiers.tokenizer import load_tokenizer
from gateway.routing.features import Features
from gateway.routing.rules import matches
from model_workers.tiers.example import Example
from model_workers.tiers.tasks import heldout
from sluice import settings as config

SEED: Final = 4001
"""Of the first run. 1001 to 1005 chose `max_prompt_chars`; no other held-out seed was used for it."""
MODELS: Final = ROOT / "model_workers" / "models"

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
    note = f"{runs} seeds from {SEED}, {n} tasks of every kind and level; peer: the rule without max_prompt_chars"
    names = ("heldout_rules_accuracy_share", "heldout_rules_token_share")
    return [
        _figure(
            name, [one[at] for one in shipped], [one[at] for one in before], note, higher=not at
        )
        for at, name in enumerate(names)
    ]


def _figure(
    name: str, ours: Sequence[float], peer: Sequence[float], note: str, *, higher: bool
) -> Figure:
    a, b = median(ours), median(peer)
    spread = f"{min(ours):.4g} to {max(ours):.4g}"
    ratio = a / b if higher else b / a
    return Figure(name, a, b, ratio, "of large's", len(ours), machine(), f"{note}; {spread}")


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
