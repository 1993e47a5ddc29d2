"""The settings file: defaults work, mistakes are told with their key."""

from pathlib import Path

import pytest

from sluice import settings
from sluice.settings.routing import HINT


def load(tmp_path: Path, text: str) -> settings.Settings:
    path = tmp_path / "sluice.yaml"
    path.write_text(text, encoding="utf-8")
    return settings.load(path)


def test_without_a_file_both_shipped_tiers_are_served() -> None:
    loaded = settings.load()
    assert [(model.name, model.tier) for model in loaded.models] == [
        ("small", "small"),
        ("large", "large"),
    ]


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "") == settings.load()


def test_a_written_file_loads_as_the_same_settings(tmp_path: Path) -> None:
    original = settings.load()
    assert load(tmp_path, original.to_yaml()) == original


def test_the_environment_wins_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_NATS__URL", "nats://10.0.0.1:4222")
    assert load(tmp_path, "nats: {url: 'nats://127.0.0.1:1'}").nats.url == "nats://10.0.0.1:4222"


def test_secrets_are_files_named_like_the_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_SECRETS", str(tmp_path))
    monkeypatch.setenv("SLUICE_NATS__PORT", "4333")
    for name, text in (
        ("SLUICE_IDENTITY__MESH_KEY", "0123456789abcdef\n"),
        ("SLUICE_NATS__PORT", "1"),
        ("others", "x"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
    loaded = load(tmp_path, "identity: {api_keys: true, mesh_key: of-the-file-of-settings}")
    assert loaded.identity.mesh_key == "0123456789abcdef"
    assert loaded.identity.api_keys
    assert loaded.nats.port == 4333


def test_a_folder_of_secrets_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_SECRETS", str(tmp_path / "none"))
    with pytest.raises(settings.SettingsError, match=r"^SLUICE_SECRETS: .*none: cannot be read"):
        load(tmp_path, "")


@pytest.mark.parametrize(
    ("models", "default"),
    [
        ("[{name: qwen, path: /q}]", "qwen"),
        ("[{name: e, path: /e, engine: embedding}, {name: small, path: /s}]", "small"),
    ],
)
def test_models_alone_are_a_configuration(models: str, default: str, tmp_path: Path) -> None:
    loaded = load(tmp_path, f"models: {models}\n")
    routing = loaded.routing
    assert (routing.default, routing.rules, routing.fallbacks) == (default, (), {})
    assert load(tmp_path, loaded.to_yaml()) == loaded
    assert len(settings.load().routing.rules) == 1


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("off", "off"),
        ("false", "off"),
        ("no", "off"),
        ("'off'", "off"),
        ("true", "tenant"),
        ("on", "tenant"),
        ("tenant", "tenant"),
        ("mesh", "mesh"),
    ],
)
def test_prefix_cache_reads_words_and_switches(tmp_path: Path, text: str, mode: str) -> None:
    loaded = load(tmp_path, f"models: [{{name: m, path: builtin:small, prefix_cache: {text}}}]")
    assert loaded.models[0].prefix_cache == mode
    assert load(tmp_path, loaded.to_yaml()) == loaded


@pytest.mark.parametrize(
    ("text", "hint"),
    [("true", HINT), ("false", None), ("null", None), ("'{draft} {x}'", "{draft} {x}")],
)
def test_cascade_hint_reads_text_and_switches(tmp_path: Path, text: str, hint: str | None) -> None:
    loaded = load(tmp_path, f"routing: {{cascade: {{first: small, second: large, hint: {text}}}}}")
    assert loaded.routing.cascade is not None
    assert loaded.routing.cascade.hint == hint


def test_shipped_batcher_holds_all_calls_of_a_gateway() -> None:
    shipped = settings.Settings()
    assert shipped.batcher.room_rows >= shipped.gateway.max_concurrent_requests


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("models: []", "models"),
        ("models: [{name: a, path: x}, {name: a, path: y}]", "models"),
        ("models: [{name: 'a.b', path: x}]", "models.0.name"),
        ("models: [{name: a, path: x, engine: magic}]", "models.0.engine"),
        ("models: [{name: a, path: x, prefix_cache: all}]", "models.0.prefix_cache"),
        ("models: [{name: a, path: x, prefix_cache: 1}]", "models.0.prefix_cache"),
        ("models: [{name: a, path: x, triton_url: []}]", "models.0.triton_url"),
        ("models: [{name: a, path: x, triton_url: ['h:1', 'h:1']}]", "models.0.triton_url"),
        ("models: [{name: a, path: x, triton_url: 'h:1', standby: 1}]", r"models\.0\.standby"),
        ("routing: {rules: [{model: large, reason: r}]}", "routing.rules.0"),
        ("routing: {rules: [{model: x, reason: r, min_numbers: 1}]}", "routing.rules.0.model"),
        ("routing: {shadows: [{model: x, of: small, share: 1}]}", "routing.shadows.0.model"),
        ("routing: {shadows: [{model: small, of: x, share: 1}]}", "routing.shadows.0.of"),
        ("routing: {shadows: [{model: small, of: small, share: 1}]}", "routing.shadows.0"),
        ("routing: {shadows: [{model: large, of: small, share: 0}]}", "routing.shadows.0.share"),
        ("routing: {cascade: {first: small, second: large, hint: see above}}", "cascade.hint"),
        ("routing: {cascade: {first: small, second: large, hint: '{draft}{draft}'}}", "once"),
        ("routing: {cascade: {first: small, second: large, hint: [x]}}", "cascade.hint"),
        ("routing: {canaries: [{model: small, of: small, share: 1}]}", "routing.canaries.0"),
        ("routing: {outcomes: {pair: [small, x]}}", "routing.outcomes.pair.1"),
        ("routing: {outcomes: {weak: small}}", "routing.outcomes"),
        ("routing: {outcomes: {pair: [small, small]}}", "routing.outcomes.pair"),
        ("routing: {outcomes: {tenants: [acme]}}", r"routing\.outcomes: name the two models"),
    ],
)
def test_a_mistake_is_told_with_its_key(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(settings.SettingsError, match=key):
        load(tmp_path, text)


def test_safety_policies_are_handed_through(tmp_path: Path) -> None:
    text = "safety: {policies: {default: {restore: true, actions: {'pii.*': redact}}}}"
    loaded = load(tmp_path, text)
    assert loaded.safety == {
        "policies": {"default": {"restore": True, "actions": {"pii.*": "redact"}}}
    }
    assert load(tmp_path, loaded.to_yaml()) == loaded


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(settings.SettingsError, match="cannot be read"):
        settings.load(tmp_path / "none.yaml")


def test_unknown_builtin_and_missing_folder_are_told(tmp_path: Path) -> None:
    with pytest.raises(settings.SettingsError, match="builtin:small"):
        settings.resolve_model_path("builtin:medium")
    with pytest.raises(settings.SettingsError, match="does not exist"):
        settings.resolve_model_path(str(tmp_path / "none"))


def test_a_hub_id_is_left_alone() -> None:
    assert settings.resolve_model_path("org/model") == "org/model"


def test_a_mesh_may_have_no_model_that_takes_prompts(tmp_path: Path) -> None:
    loaded = load(tmp_path, "models: [{name: e, path: /e, engine: embedding}]")
    assert load(tmp_path, loaded.to_yaml()) == loaded
    with pytest.raises(settings.SettingsError, match="'e' has engine embedding and answers no"):
        load(
            tmp_path,
            "models: [{name: e, path: /e, engine: embedding}]\nrouting: {default: e, rules: []}",
        )
