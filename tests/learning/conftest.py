"""Routers that were learned once."""

import pytest

from gateway.routing.learned.model import LearnedRouter
from learning import train as training
from tests.learning.made_up import outcomes


@pytest.fixture(scope="session")
def by_prompt() -> LearnedRouter:
    """Learned from prompts that tell."""
    return training.train(outcomes(120))


@pytest.fixture(scope="session")
def by_answer() -> LearnedRouter:
    """Learned from answers that tell."""
    return training.train(outcomes(120, answers=True))
