"""Policies of a configuration: the example of the page works, what cannot work is refused with its line."""

import re
from pathlib import Path

import pytest

from gateway.policies import load_inspector, read_policies
from gateway.safety.actions import Action
from gateway.safety.findings import Severity
from gateway.safety.names import rule_names
from sluice import settings as configuration
from sluice.settings import Settings, SettingsError

PAGE = Path(__file__).parents[2] / "docs" / "safety.md"


def load(tmp_path: Path, text: str) -> tuple[Settings, Path]:
    path = tmp_path / "sluice.yaml"
    path.write_text(text, encoding="utf-8")
    return configuration.load(path), path


def test_without_a_section_everything_is_flagged() -> None:
    policy = read_policies(Settings()).choose("default", {})
    assert policy.actions.choose("secret.assignment", Severity.CRITICAL).action is Action.FLAG
    assert policy.actions.choose("limit.length", Severity.CRITICAL).action is Action.BLOCK


def test_the_example_of_the_page_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "codenames.txt").write_text("blue heron\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    policies = read_policies(*load(tmp_path, example))
    assert set(policies.by_name) == {"default", "strict"}
    assert policies.choose("default", {"team": "finance"}).deny == ("blue heron",)


def test_the_page_names_every_family_and_rule_of_ours() -> None:
    page = PAGE.read_text(encoding="utf-8")
    plain = {name for name in rule_names() if ".encoded." not in name}
    assert [name for name in sorted(plain) if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("restore: maybe", "line 4: safety.policies.default.restore: Input should be"),
        ("output: {ansi: sometimes}", "line 4: safety.policies.default.output.ansi: Input should"),
        ("output: {actions: {pii.*: {route: large}}}", "pii.*: an answer cannot be routed"),
        ("actions: {limit.length: flag}", "actions.limit.length: must block"),
        ("actions: {unicode.*: redact}", "actions.unicode.*: is normalization's"),
        ("actions: {pii.nothing: flag}", "no rule 'pii.nothing'"),
        ("actions: {pii.*: {route: nobody}}", "no model 'nobody'; known: small, large"),
        ("deny: [missing.txt]", "missing.txt: cannot be read"),
        ("limits: {languages: [en]}", "limits.languages: Extra inputs"),
    ],
)
def test_what_cannot_work_is_refused_with_its_place(tmp_path: Path, body: str, says: str) -> None:
    text = f"safety:\n  policies:\n    default:\n      {body}\n"
    with pytest.raises(SettingsError) as caught:
        read_policies(*load(tmp_path, text))
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/sluice.yaml: line 4: safety.")


def test_a_dry_run_of_no_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"line 1: safety\.dry_run: no policy 'next'"):
        read_policies(*load(tmp_path, "safety: {dry_run: next}"))


def test_an_entry_that_is_too_long_is_refused(tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("x" * 300, encoding="utf-8")
    text = f"safety: {{policies: {{default: {{deny: ['{words}']}}}}}}"
    with pytest.raises(SettingsError, match=r"deny\.list: an entry is longer than 256"):
        read_policies(*load(tmp_path, text))


def test_the_environment_has_its_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_SAFETY__DEFAULT", "nope")
    with pytest.raises(SettingsError, match="no policy 'nope'"):
        read_policies(*load(tmp_path, "safety: {default: default}"))


def test_labels_choose_the_policy(tmp_path: Path) -> None:
    text = "safety: {policies: {default: {}, b: {default: block}}, choose: [{labels: {k: v}, policy: b}]}"
    inspector = load_inspector(*load(tmp_path, text))
    assert inspector.begin("default", {"k": "v"}, []).policy.name == "b"
    assert inspector.begin("default", {}, []).policy.name == "default"
