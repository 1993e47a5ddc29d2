"""Routers that were learned once, with few trees: what is tested needs no more."""

from collections.abc import Iterator

import pytest

from gateway.routing.learned import growing, training
from gateway.routing.learned.router import LearnedRouter
from tests.gateway.routing.learned.made_up import outcomes


@pytest.fixture(autouse=True)
def _few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "TREES", 20)


@pytest.fixture(scope="session")
def by_prompt() -> Iterator[LearnedRouter]:
    """Learned from prompts that tell."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing, "TREES", 20)
        yield training.train(outcomes(120))


@pytest.fixture(scope="session")
def by_answer() -> Iterator[LearnedRouter]:
    """Learned from answers that tell."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing, "TREES", 20)
        yield training.train(outcomes(120, answers=True))
