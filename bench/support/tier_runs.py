"""Strategies of routing, and their runs on the embedded mesh: tasks of `sluice eval`, in interleaved rounds."""

import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.support import meshes
from bench.support.harness import Figure, machine
from bench.support.meshes import mesh_of
from bench.support.tradeoffs import Tradeoff, tradeoffs
from cli.evaluate import write_outcomes
from cli.files import NewFile, open_table
from cli.questions import Question, Result, ask_all, support_questions
from gateway.routing.learned import artefact
from learning import outcomes
from learning.train import train
from sluice import settings as config
from sluice.client.aio import AsyncClient
from sluice.client.request import GenerateOptions
from sluice.settings.routing import (
    CascadeRoute,
    LearnedRoute,
    RoutingPolicy,
    RoutingSettings,
    Selection,
    Target,
)

WEAK: Final = "small"
STRONG: Final = "large"
LABEL: Final = "strategy"
PRICES: Final = {WEAK: 0.16, STRONG: 1.0}
"""Per million tokens, of prompts as of answers, in the ratio of the parameters."""
COMMIT_TOKENS: Final = 64
"""The small tier's answers end before, so that they are checked whole."""


@dataclass(frozen=True)
class Strategy:
    """How "auto" is resolved, and what the caller says to it."""

    policy: RoutingPolicy
    accept_replace: bool = False


def strategies(router: Path) -> dict[str, Strategy]:
    """All of them; ``router`` is an artefact of `sluice router train --cascade`."""
    shipped = config.Settings().routing.model_dump(include=set(RoutingPolicy.model_fields))
    return {
        WEAK: Strategy(RoutingPolicy(default=WEAK)),
        STRONG: Strategy(RoutingPolicy(default=STRONG)),
        "rules": Strategy(RoutingPolicy.model_validate(shipped)),
        "learned-quality": Strategy(RoutingPolicy(learned=_learned(router, quality=1.0))),
        "learned-share": Strategy(RoutingPolicy(learned=_learned(router, strong_share=0.3))),
        "cascade-judged": Strategy(RoutingPolicy(cascade=_cascade(router))),
        "cascade-replace": Strategy(RoutingPolicy(cascade=_cascade(router, mode="replace")), True),
        "learned-cascade": Strategy(
            RoutingPolicy(learned=_learned(router, quality=0.9), cascade=_cascade(router))
        ),
    }


def mesh_settings(named: Mapping[str, Strategy]) -> config.Settings:
    """A mesh of both tiers with ``named``, each for requests with its label.

    Without prefix caches: all strategies ask the same questions, and whoever comes first would pay for the others.
    """
    policies = {name: strategy.policy for name, strategy in named.items()}
    select = tuple(Selection(policy=name, labels={LABEL: name}) for name in named)
    routing = RoutingSettings(default=WEAK, policies=policies, select=select)
    tiers = (_tier(name, price) for name, price in PRICES.items())
    return meshes.mesh_settings(*tiers, routing=routing)


def _tier(name: str, price: float) -> config.ModelSettings:
    return config.ModelSettings(
        name=name,
        tier=name,
        path=f"builtin:{name}",
        prefix_cache=False,
        prompt_price=price,
        answer_price=price,
    )


def _learned(router: Path, **target: float) -> LearnedRoute:
    return LearnedRoute(
        artefact=str(router), weak=WEAK, strong=STRONG, target=Target.model_validate(target)
    )


def _cascade(router: Path, **fields: Any) -> CascadeRoute:
    values = {
        "first": WEAK,
        "second": STRONG,
        "commit_tokens": COMMIT_TOKENS,
        "artefact": str(router),
        "target": Target(quality=1.0),
        "checks": ("finished", "json"),
        **fields,
    }
    return CascadeRoute.model_validate(values)


CALLERS: Final = 8
TRAINING_SEED: Final = 77
LEARN_FROM: Final = 100
"""Tasks of every kind and level, of the training side of the split."""
HELDOUT_SEED: Final = 3001
"""Of the first round; `max_prompt_chars` of the shipped rule was chosen on 1001 to 1005."""
HEADLINE: Final = "cascade-judged"
"""The cascade whose figures docs/concepts/routing.md publishes."""
ACCURACY_MIN: Final = 0.99
TOKENS_MAX: Final = 0.4

_ASK: Final[GenerateOptions] = {"temperature": 0.0, "priority": "standard", "timeout_s": 120.0}


async def run(runs: int, n: int) -> list[Tradeoff]:
    """Learns a router, then plays ``runs`` rounds of ``n`` new tasks of every kind and level with every strategy."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        router = Path(folder, "desk.router")
        async with _mesh({}) as client:
            await _learn(client, router)
        named = strategies(router)
        rounds: dict[str, list[list[Result]]] = {name: [] for name in named}
        async with _mesh(named) as client:
            await _play(client, named, support_questions("heldout", 2, 0))  # warms up
            for round_ in range(runs):
                found = await _play(
                    client,
                    _turned(named, round_),
                    support_questions("heldout", n, HELDOUT_SEED + round_),
                )
                for name, results in found.items():
                    rounds[name].append(results)
    return tradeoffs(rounds, STRONG, PRICES)


def figures(found: Sequence[Tradeoff], runs: int, n: int) -> list[Figure]:
    """Accuracy and tokens of the recommended strategy under their own names, of the others with theirs behind."""
    order = sorted(found, key=lambda one: one.strategy != HEADLINE)
    return [figure for one in order for figure in _figures(one, runs, n)]


def _figures(one: Tradeoff, runs: int, n: int) -> list[Figure]:
    suffix = "" if one.strategy == HEADLINE else f"_{one.strategy.replace('-', '_')}"
    low, high = one.accuracy_band
    note = (
        f"the peer is a target; strategy {one.strategy}; {runs} rounds of {n} held-out tasks of every kind and level,"
        f" seeds from {HELDOUT_SEED}, {CALLERS} callers, {PRICES[WEAK]:g} and {PRICES[STRONG]:g} per million tokens"
    )
    also = {
        "right_share": one.accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
        "answer_token_share": one.answer_token_share,
        "cost_of_1000": one.cost,
        "escalated_share": one.escalated_share,
        "ttft_p50_ms": one.ttft.p50,
        "ttft_p95_ms": one.ttft.p95,
        "latency_p50_ms": one.latency.p50,
        "latency_p95_ms": one.latency.p95,
    }
    accuracy = one.accuracy_share / ACCURACY_MIN
    tokens = TOKENS_MAX / one.token_share if one.token_share else None
    values = (
        (
            "routed_accuracy_share",
            one.accuracy_share,
            ACCURACY_MIN,
            accuracy,
            "of large's right answers",
        ),
        ("large_token_share", one.token_share, TOKENS_MAX, tokens, "of large's tokens alone"),
    )
    return [
        Figure(f"{name}{suffix}", ours, bound, ratio, unit, runs, machine(), note, also=also)
        for name, ours, bound, ratio, unit in values
    ]


@asynccontextmanager
async def _mesh(named: Mapping[str, Strategy]) -> AsyncIterator[AsyncClient]:
    async with mesh_of(mesh_settings(named)) as mesh, AsyncClient(mesh.address) as client:
        yield client


async def _learn(client: AsyncClient, router: Path) -> None:
    """`sluice eval --outcomes`, then `sluice router train --cascade`."""
    questions = support_questions("train", LEARN_FROM, TRAINING_SEED)
    answers = [
        await ask_all(client, model, questions, CALLERS, {**_ASK, "model": model})
        for model in (WEAK, STRONG)
    ]
    path = router.with_suffix(".csv")
    with NewFile(path) as file:
        write_outcomes(file, questions, *answers)
    with open_table(path) as (columns, rows):
        read = outcomes.gather([outcomes.Source(path.name, columns, rows)])
    artefact.save_to(train(read), router)


async def _play(
    client: AsyncClient, named: Mapping[str, Strategy], questions: Sequence[Question]
) -> dict[str, list[Result]]:
    """The same questions with one strategy after the other."""
    return {
        name: await ask_all(
            client,
            name,
            questions,
            CALLERS,
            {**_ASK, "labels": {LABEL: name}, "accept_replace": strategy.accept_replace},
        )
        for name, strategy in named.items()
    }


def _turned(named: Mapping[str, Strategy], by: int) -> dict[str, Strategy]:
    """Another one begins in each round."""
    items = list(named.items())
    by %= len(items)
    return dict(items[by:] + items[:by])
