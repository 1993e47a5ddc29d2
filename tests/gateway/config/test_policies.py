"""Policies of a configuration: the example of the page works, and labels come from folders of classifiers."""

import json
import re
from pathlib import Path

import pytest

from gateway.config.policies import read_policies
from gateway.safety.policy import rule_names
from sluice import settings as configuration
from sluice.settings import Settings, SettingsError

PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "safety.md"


def load(tmp_path: Path, text: str) -> Settings:
    path = tmp_path / "sluice.yaml"
    path.write_text(text, encoding="utf-8")
    return configuration.load(path)


def test_the_example_of_the_page_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, example = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "codenames.txt").write_text("blue heron\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    policies = read_policies(load(tmp_path, example))
    assert set(policies.by_name) == {"default", "strict"}
    (rule,) = policies.settings.choose
    assert rule.holds("default", {"team": "finance"})
    assert policies.by_name[rule.policy].deny == ("blue heron",)


def test_the_page_names_every_family_and_rule_of_ours() -> None:
    page = PAGE.read_text(encoding="utf-8")
    plain = {name for name in rule_names() if ".encoded." not in name}
    assert [name for name in sorted(plain) if f"`{name}`" not in page] == []


def classifier(folder: Path, config: dict[str, object]) -> dict[str, str]:
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps(config))
    return {"name": "judge", "path": str(folder), "engine": "classifier"}


@pytest.mark.parametrize(
    ("labels", "error"),
    [
        (None, "config.json has no labels; name them in id2label"),
        ({"0": "BAD"}, "has no labels"),
        ({"1": "BAD", "2": "GOOD"}, "numbers its labels otherwise"),
        ({"0": "BAD", "1": "BAD"}, "numbers its labels otherwise"),
        ({"0": "GOOD", "1": "BAD"}, "judge has no label 'EVIL'; known: GOOD, BAD"),
    ],
)
def test_labels_are_those_of_the_folder(
    tmp_path: Path, labels: dict[str, str] | None, error: str
) -> None:
    judge = classifier(tmp_path / "judge", {} if labels is None else {"id2label": labels})
    guard = {"model": "judge", "template": "classifier", "categories": ["EVIL"]}
    settings = {
        "models": [judge, {"name": "small", "path": "builtin:small"}],
        "routing": {"default": "small"},
        "safety": {"policies": {"default": {"guard": {"g": guard}}}},
    }
    with pytest.raises(SettingsError) as caught:
        read_policies(load(tmp_path, json.dumps(settings)))
    assert error in str(caught.value)


def test_the_environment_has_its_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_SAFETY__DEFAULT", "nope")
    with pytest.raises(SettingsError, match="no policy 'nope'"):
        read_policies(load(tmp_path, "safety: {default: default}"))


def test_only_the_folders_of_classifiers_are_looked_at() -> None:
    """A model whose folder is missing is refused by who loads it, with its name."""
    echo = {"name": "echo", "engine": "echo", "path": "/nowhere"}
    settings = Settings.model_validate({"models": [echo], "routing": {"default": "echo"}})
    assert read_policies(settings).by_name
    guard = echo | {"engine": "classifier"}
    settings = Settings.model_validate(
        {"models": [echo, guard | {"name": "guard"}]} | {"routing": {"default": "echo"}}
    )
    with pytest.raises(SettingsError, match="/nowhere"):
        read_policies(settings)
