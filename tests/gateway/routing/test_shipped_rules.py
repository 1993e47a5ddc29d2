"""The shipped rules send support tasks to the specialists and everything else to the general model.

The rules were written with the tuning half of the prompts and with tasks of the training side; everything here is held
out.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from gateway.routing.features import Features
from gateway.routing.router import Plan, Router
from model_workers.tiers.example import CELLS, Cell
from model_workers.tiers.tasks import generate
from sluice.settings.shipped import CHAT, GENERAL_ROUTING, SPECIALISTS

ROOT = Path(__file__).parents[3]
PROMPTS = json.loads((ROOT / "bench/tiers/routed_prompts.json").read_text(encoding="utf-8"))
ROUTER = Router(GENERAL_ROUTING, {model.name: model for model in (*SPECIALISTS, CHAT)})
SEED = 20_461
N = 100


def plan(prompt: str) -> Plan:
    return ROUTER.plan(Features(None, text=prompt))


def routed(prompts: Iterable[str]) -> Counter[str]:
    return Counter(plan(prompt).model for prompt in prompts)


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_shipped_rules_send_tasks_to_specialists(cell: Cell) -> None:
    models = routed(task.prompt for task in generate(SEED, N, cell, "heldout"))
    assert models["chat"] <= 0.05 * N
    if cell[0] == "total" or cell[1] == "hard":
        assert models["large"] >= 0.95 * N
    else:
        assert models["small"] >= 0.95 * N


def test_shipped_rules_find_tasks_in_other_words() -> None:
    prompts = PROMPTS["support"]["heldout"]
    assert routed(prompts)["chat"] <= 0.05 * len(prompts)


def test_shipped_rules_leave_other_prompts_to_chat() -> None:
    prompts = PROMPTS["general"]["heldout"]
    assert len(prompts) > 100
    assert routed(prompts)["chat"] >= 0.98 * len(prompts)


@pytest.mark.parametrize("kind", ["general", "support"])
def test_routed_prompts_are_held_out(kind: str) -> None:
    halves = PROMPTS[kind]
    assert not set(halves["tuning"]) & set(halves["heldout"])
    assert 0.4 < len(halves["heldout"]) / len(halves["tuning"]) < 1.5


@pytest.mark.parametrize(
    ("prompt", "model", "reason"),
    [
        ("What is the total of 12, 30?", "large", "a sum of two numbers or more"),
        ("Sort: 31, 7, 19", "small", "a few numbers to sort"),
        ("Sort: 31, 7, 19, 4", "large", "four numbers or more to sort"),
        (
            "Which label fits this ticket? I never got my lamp.",
            "small",
            "a support ticket to label, to extract from or to answer",
        ),
        ("What is the capital of France?", "chat", "no rule matched: the default model"),
    ],
)
def test_shipped_rules_give_a_reason(prompt: str, model: str, reason: str) -> None:
    found = plan(prompt)
    assert (found.model, found.reason) == (model, reason)


def test_shipped_rules_look_at_the_last_turn() -> None:
    turns = ["Sort: 31, 7, 19", "What is the capital of France?"]
    assert ROUTER.plan(Features(None, text="\n".join(turns), last_turn=turns[1])).model == "chat"
    assert ROUTER.plan(Features(None, text="\n".join(turns), last_turn=turns[0])).model == "small"
