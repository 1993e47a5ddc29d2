"""What is asked of a guard that classifies."""

from types import SimpleNamespace
from typing import Any

from gateway.safety.guards.checks import Check, Guard
from gateway.safety.guards.families import family_of
from gateway.safety.settings import GuardSettings
from gateway.upstream.guards import prompts_of

TURNS = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
SETTINGS = GuardSettings.model_validate(
    {"model": "m", "template": "classifier", "categories": ["BAD"], "checks": ["input", "output"]}
)


def asked(check: Check) -> list[str]:
    """The texts of the rows, by a tokenizer that gives a number a character."""
    tokenizer = SimpleNamespace(
        segments=lambda text, most: [SimpleNamespace(token_ids=list(map(ord, text)))]
    )
    model: Any = SimpleNamespace(tokenizer=tokenizer, context_tokens=512)
    family = family_of(SETTINGS, ("GOOD", "BAD"))
    return ["".join(map(chr, prompt)) for prompt in prompts_of(family, model, TURNS, check)]


def test_a_classifier_reads_the_turns_of_the_user_or_the_answer() -> None:
    guard = Guard("harm", SETTINGS, family_of(SETTINGS, ("GOOD", "BAD")))
    assert asked(Check(1, guard)) == ["user\nuser"]
    assert asked(Check(2, guard, in_answer=True, tokens=1, answer="yes")) == ["yes"]
    assert asked(Check(3, guard, in_answer=True, tokens=1, answer="")) == [""]
