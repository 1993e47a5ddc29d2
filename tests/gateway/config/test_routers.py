"""Learned routers named in the configuration: loaded, asked, and refused when they cannot work."""

from pathlib import Path
from typing import Any

import pytest

from gateway.config.policies import load_router
from gateway.routing.features import Features
from gateway.routing.learned.artefact import save_to
from gateway.routing.learned.model import LearnedRouter
from learning.outcomes import RouterOutcome
from sluice.settings import ModelSettings, Settings, SettingsError
from sluice.settings.routing import RoutingSettings
from sluice.v1.admin_pb2 import ROUTER_HEAD_CASCADE, ROUTER_HEAD_PROMPT
from tests.learning.made_up import outcomes

MODELS = {name: ModelSettings(name=name, path=name) for name in ("small", "large")}


def trained(rows: list[RouterOutcome]) -> LearnedRouter:
    from learning.train import train  # scikit-learn: not for every test run

    return train(rows, seed=1)


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("router") / "prompts.router"
    save_to(trained(outcomes(150)), path)
    return path


def settings(path: object, target: dict[str, float], **more: Any) -> Settings:
    learned = {"artefact": str(path), "weak": "small", "strong": "large", "target": target}
    return Settings(routing=RoutingSettings.model_validate({"learned": learned, **more}))


def test_the_target_moves_the_line(artefact: Path) -> None:
    texts = [row.prompt for row in outcomes(150)]
    shares = []
    for share in (0.1, 0.5, 1.0):
        router = load_router(settings(artefact, {"strong_share": share}), MODELS)
        plans = [router.plan(Features(None, text=text)) for text in texts]
        shares.append(sum(plan.model == "large" for plan in plans) / len(plans))
        assert {plan.strategy_word for plan in plans} == {"learned"}
        assert all("predicted gain" in plan.reason for plan in plans)
        assert all(plan.versions["router"] for plan in plans)
    assert shares == sorted(shares)
    assert shares[0] < 0.4
    assert shares[-1] == 1.0


def test_load_router_names_a_bad_artefact(artefact: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.router"
    cut.write_bytes(artefact.read_bytes()[:-100])
    for path in (cut, tmp_path / "none.router"):
        with pytest.raises(SettingsError, match=r"^routing\.learned\.artefact: "):
            load_router(settings(path, {"quality": 0.9}), MODELS)
    cascade = {"first": "small", "second": "large", "artefact": str(artefact)}
    with pytest.raises(SettingsError, match=r"routing\.cascade\.artefact: .* without answers"):
        load_router(settings(artefact, {"quality": 0.9}, cascade=cascade), MODELS)


CASCADE = {"first": "small", "second": "large", "checks": ["finished", "spelling"]}
REFUSED = [
    (
        {"rules": [{"model": "large", "contains": ["("], "reason": "r"}]},
        r"^routing\.rules\.0\.contains\.0: missing \): \(",
    ),
    (
        {"policies": {"p": {"cascade": CASCADE}}},
        r"^routing\.policies\.p\.cascade\.checks\.1: no check 'spelling'; known: finished, json, sums",
    ),
]


@pytest.mark.parametrize(("routing", "message"), REFUSED, ids=["pattern", "check"])
def test_what_cannot_work_is_refused_with_its_key(routing: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_router(Settings(routing=RoutingSettings.model_validate(routing)), MODELS)


def test_cascade_head_ignores_prompts_sent_to_the_strong_model(
    tmp_path: Path,
) -> None:
    path = tmp_path / "both.router"
    saved = save_to(trained(outcomes(60, answers=True)), path)
    assert saved.cascade is not None
    cascade = {"first": "small", "second": "large", "artefact": str(path)}
    prompts, judged = saved.prompts.calibration.gains, saved.cascade.calibration.gains
    for share in (0.5, 1.0):
        routing = settings(path, {"strong_share": share}, cascade=cascade)
        held_out = load_router(routing, MODELS).held_out
        assert {by.policy for by in held_out} == {"routing"}
        by_head = {by.head: gains for by, gains in held_out.items()}
        threshold = saved.prompts.calibration.for_large_share(share).value
        kept = prompts < threshold
        assert by_head[ROUTER_HEAD_PROMPT].tolist() == prompts.tolist()
        expected = judged[kept] if kept.any() else judged
        assert by_head[ROUTER_HEAD_CASCADE].tolist() == expected.tolist()
    alone = RoutingSettings.model_validate({"cascade": cascade})
    (gains,) = load_router(Settings(routing=alone), MODELS).held_out.values()
    assert gains.tolist() == judged.tolist()
