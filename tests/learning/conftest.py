"""Routers that were learned once, with few trees: what is tested needs no more."""

from collections.abc import Iterator

import pytest

from gateway.routing.learned.model import LearnedRouter
from learning import train as training
from tests.learning.made_up import outcomes


@pytest.fixture(autouse=True)
def _few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "TREES", 10)


@pytest.fixture(scope="session")
def by_prompt() -> Iterator[LearnedRouter]:
    """Learned from prompts that tell."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "TREES", 10)
        yield training.train(outcomes(120))


@pytest.fixture(scope="session")
def by_answer() -> Iterator[LearnedRouter]:
    """Learned from answers that tell."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "TREES", 10)
        yield training.train(outcomes(120, answers=True))
