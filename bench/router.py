"""What the shipped rules save and whom they choose: the large tier's tokens and right answers, and where prompts go.

    python bench/router.py [--json] [--runs N] [--n N]

`heldout_rules_token_share`: tokens of prompts and answers that the large tier computes when the rules of the default
mesh (two specialists and the general model) choose a model for each support task, of those that it computes alone;
peer: the rule `min_numbers: 4` alone, which nobody tuned. `also` has three shares:

- `accuracy_share`: right answers, of those of the large tier alone; what goes to the general model counts as wrong.
- `specialist_share`: support tasks that go to a specialist.
- `general_share`: other prompts that go to the general model, of the held-out half of `routed_prompts.json`.
- `learned_token_share`, `learned_accuracy_share`: the same two shares when a learned router with the target
  `quality: 0.99` chooses between the specialists. It is trained on --learn tasks of every kind and level of another
  seed, answered in the same way, so no prompt that it is judged by had a part in it.

Both tiers answer every held-out task of `sluice eval` as a worker on a CPU computes it (float32, greedy), without a
mesh; a round is a seed that no choice was made on, with --n tasks of every kind and level.
"""

import json
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
from gateway.routing.router import Router
from learning.outcomes import RouterOutcome
from learning.train import train
from model_workers.tiers.example import Example
from model_workers.tiers.tasks import heldout
from sluice.settings.routing import RouteRule, RoutingSettings
from sluice.settings.shipped import CHAT, GENERAL_ROUTING, SPECIALISTS

SEED: Final = 4001
"""Of the first round. No choice was made on this or a later seed."""
LEARN_SEED: Final = 3001
"""Of the tasks that the learned router is trained on."""
QUALITY: Final = 0.99
"""Its target: the share of the large tier's right answers that it keeps."""
MODELS: Final = ROOT / "model_workers" / "models"
PROMPTS: Final = ROOT / "bench" / "tiers" / "routed_prompts.json"
WEAK, STRONG = (model.name for model in SPECIALISTS)
UNTUNED: Final = RoutingSettings(
    default=WEAK, rules=(RouteRule(model=STRONG, min_numbers=4, reason="four numbers or more"),)
)

Chooses = Callable[[str], str]
"""The model that a prompt goes to."""


@dataclass(frozen=True)
class Answered:
    """A task with what both tiers made of it: whether it was right, and the tokens of prompt and answer."""

    prompt: str
    weak_right: bool
    strong_right: bool
    weak_answer: str
    strong_tokens: int


@dataclass(frozen=True)
class Shares:
    """What a choice of models gives in a round, see the module."""

    accuracy: float
    tokens: float
    specialists: float


def figures(runs: int, n: int, learn: int) -> list[Figure]:
    """``runs`` seeds of ``n`` tasks of every kind and level; ``learn`` of them train the learned router."""
    shipped, untuned = chooser(GENERAL_ROUTING), chooser(UNTUNED)
    tiers = _Tiers()
    rounds = [tiers.answered(heldout(n, SEED + number)) for number in range(runs)]
    ours = [_shares(round_, shipped) for round_ in rounds]
    trained = learned(tiers.answered(heldout(learn, LEARN_SEED)))
    by_learned = [_shares(round_, trained) for round_ in rounds]
    prompts = json.loads(PROMPTS.read_text(encoding="utf-8"))["general"]["heldout"]
    general = sum(shipped(prompt) == CHAT.name for prompt in prompts)
    return [
        paired(
            "heldout_rules_token_share",
            [one.tokens for one in ours],
            [_shares(round_, untuned).tokens for round_ in rounds],
            unit="of large's",
            higher_is_better=False,
            note=f"seeds from {SEED}, {n} tasks of every kind and level; peer: min_numbers: 4 alone",
            also={
                "accuracy_share": median(one.accuracy for one in ours),
                "specialist_share": median(one.specialists for one in ours),
                "general_share": general / len(prompts),
                "learned_token_share": median(one.tokens for one in by_learned),
                "learned_accuracy_share": median(one.accuracy for one in by_learned),
            },
        )
    ]


def chooser(routing: RoutingSettings) -> Chooses:
    """The choice of the default mesh's models by ``routing``."""
    router = Router(routing, {model.name: model for model in (*SPECIALISTS, CHAT)})
    return lambda prompt: router.plan(Features(None, text=prompt)).model


def learned(answered: Sequence[Answered]) -> Chooses:
    """The choice of a learned router between the specialists, trained on ``answered``."""
    outcomes = [
        RouterOutcome(
            str(number), one.prompt, float(one.weak_right), float(one.strong_right), one.weak_answer
        )
        for number, one in enumerate(answered)
    ]
    head = train(outcomes).prompts
    threshold = head.calibration.for_quality(QUALITY).value
    return lambda prompt: STRONG if head.score(prompt).gain >= threshold else WEAK


def _shares(answered: Sequence[Answered], chooses: Chooses) -> Shares:
    chosen = [chooses(one.prompt) for one in answered]
    pairs = [*zip(answered, chosen, strict=True)]
    right = sum(
        (model == STRONG and one.strong_right) or (model == WEAK and one.weak_right)
        for one, model in pairs
    )
    return Shares(
        accuracy=right / sum(one.strong_right for one in answered),
        tokens=sum(one.strong_tokens for one, model in pairs if model == STRONG)
        / sum(one.strong_tokens for one in answered),
        specialists=sum(model in (WEAK, STRONG) for model in chosen) / len(chosen),
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
                small,
                sum(len(self._tokenizer(text)["input_ids"]) for text in (example.prompt, large)),
            )
            for example, small, large in zip(examples, weak, strong, strict=True)
        ]


def main() -> None:
    """Prints the figure."""
    parser = options_of(__doc__, "seeds")
    parser.add_argument("--n", type=int, default=20, help="tasks per kind, level and round")
    about = "tasks per kind and level that train the learned router"
    parser.add_argument("--learn", type=int, default=20, help=about)
    options = parser.parse_args()
    emit(figures(options.runs, options.n, options.learn), options.json)


if __name__ == "__main__":
    main()
