"""Every strategy is a policy that a gateway loads, and requests find it by its label."""

from pathlib import Path

from bench.support.tier_runs import LABEL, STRONG, WEAK, mesh_settings, strategies
from gateway.config.policies import load_router
from gateway.routing.features import Features
from gateway.routing.learned import artefact
from learning import train as training
from tests.learning.made_up import outcomes


def test_requests_find_their_strategy(tmp_path: Path) -> None:
    file = tmp_path / "desk.router"
    artefact.save_to(training.train(outcomes(60, answers=True)), file)
    named = strategies(file)
    settings = mesh_settings(named)
    router = load_router(settings, {model.name: model for model in settings.models})

    def plan(name: str, text: str) -> tuple[str, str]:
        found = router.plan(Features(None, text, labels={LABEL: name}))
        return found.model, found.strategy

    assert plan("rules", "Sort 4, 3, 2, 1") == (STRONG, "rules")
    assert plan(WEAK, "Sort 4, 3, 2, 1") == (WEAK, "rules")
    assert plan(STRONG, "Hello") == (STRONG, "rules")
    assert plan("learned-share", "Hello")[1] == "learned"
    for name in ("cascade-judged", "cascade-replace"):
        assert plan(name, "Hello") == (WEAK, "cascade")
