"""Where models are cached, and what the defaults serve with and without the general model."""

import json
import os
import sys
from pathlib import Path

import pytest

from sluice import settings
from sluice.settings import SettingsError, resolve_model_path
from sluice.settings.model_cache import (
    CHAT_FILE,
    MARKER,
    chat_problem,
    converted_folder,
    is_converted,
    model_cache,
)
from sluice.settings.models import CHAT_PATH


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("SLUICE_MODEL_CACHE", str(folder))
    return folder


@pytest.fixture
def chat(cache: Path) -> Path:
    """A cache with a file in place of the general model."""
    (cache / CHAT_FILE).write_bytes(b"GGUF")
    return cache


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"SLUICE_MODEL_CACHE": "/m", "XDG_CACHE_HOME": "/x"}, "/m"),
        ({"SLUICE_MODEL_CACHE": "~/m"}, "/h/m"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/sluice/models"),
        # A relative one is to be ignored, says the specification.
        ({"XDG_CACHE_HOME": "x"}, "/h/.cache/sluice/models"),
        ({"SLUICE_MODEL_CACHE": "", "XDG_CACHE_HOME": ""}, "/h/.cache/sluice/models"),
    ],
)
def test_model_cache_follows_the_environment(
    variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLUICE_MODEL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/h")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert model_cache() == Path(folder)


def test_model_cache_of_a_user_without_a_home_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLUICE_MODEL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(SettingsError, match=r"^SLUICE_MODEL_CACHE: is not set"):
        model_cache()
    assert len(settings.load().models) == 2


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("SLUICE_MODEL_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(SettingsError, match=r"cache.*; give access, or name another cache"):
        converted_folder(file)


def test_defaults_serve_specialists_alone_without_chat(cache: Path) -> None:
    loaded = settings.load()
    assert [model.name for model in loaded.models] == ["small", "large"]
    assert loaded.routing.default == "small"
    problem = chat_problem()
    assert problem is not None
    assert str(cache) in problem
    assert "run scripts/chat_model" in problem


def test_defaults_serve_chat_where_its_weights_are(chat: Path) -> None:
    loaded = settings.load()
    assert [(model.name, model.tier) for model in loaded.models] == [
        ("small", "small"),
        ("large", "large"),
        ("chat", "general"),
    ]
    assert loaded.routing.default == "chat"
    served = loaded.models[2]
    assert (served.path, served.context_tokens, served.slots, served.cache_gb) == (
        CHAT_PATH, 2048, 8, 0.75,
    )  # fmt: skip


def test_written_defaults_with_chat_load_the_same(chat: Path, tmp_path: Path) -> None:
    original = settings.load()
    file = tmp_path / "sluice.yaml"
    file.write_text(original.to_yaml(), encoding="utf-8")
    (chat / CHAT_FILE).unlink()  # a process reads what the supervisor resolved
    assert settings.load(file) == original


def test_own_models_with_names_of_shipped_ones_get_no_chat_rules(tmp_path: Path) -> None:
    file = tmp_path / "sluice.yaml"
    models = ", ".join(f"{{name: {name}, path: /m}}" for name in ("small", "large", "chat"))
    file.write_text(f"models: [{models}]\n")
    assert settings.load(file).routing.default == "small"


def test_chat_without_its_package_is_not_served(
    chat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr("sluice.settings.model_cache.find_spec", lambda name: None)
    problem = chat_problem()
    assert problem is not None
    assert "pip install 'gguf>=0.19' (extra chat)" in problem
    assert len(settings.load().models) == 2


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (CHAT_PATH, r"^builtin:chat: .* run scripts/chat_model"),
        ("none.gguf", r"^model file /.*/none\.gguf does not exist"),
        ("~/none.GGUF", r"^model file /.*/none\.GGUF does not exist"),
        ("{folder}/broken.gguf", r"/broken\.gguf: is not a GGUF file"),
    ],
)
def test_a_model_that_cannot_be_resolved_is_named(path: str, says: str, cache: Path) -> None:
    (cache / "broken.gguf").write_bytes(b"<html>not found</html>")
    with pytest.raises(SettingsError, match=says):
        resolve_model_path(path.format(folder=cache))


def test_a_folder_called_gguf_is_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model.gguf"
    folder.mkdir()
    assert resolve_model_path(str(folder)) == str(folder)


def complete(folder: Path) -> None:
    """Make a folder look converted."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / MARKER).write_text(json.dumps({"config.json": 2}))


def test_a_converted_file_is_not_converted_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"no GGUF")
    with pytest.raises(SettingsError):  # the name of its folder: that of its lock
        converted_folder(file)
    (lock,) = (cache / "converted").glob("model-*.lock")
    complete(lock.with_suffix(""))
    assert converted_folder(file) == lock.with_suffix("")
    assert resolve_model_path(str(file)) == str(lock.with_suffix(""))

    seen = file.stat()
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns + 1))  # another file now
    with pytest.raises(SettingsError):
        converted_folder(file)


def test_a_converted_folder_that_lost_a_file_does_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    assert not is_converted(folder)
    complete(folder)
    assert is_converted(folder)
    (folder / "config.json").write_text("{ }")
    assert not is_converted(folder)
    (folder / "config.json").unlink()
    assert not is_converted(folder)
    (folder / MARKER).write_text("[]")
    assert not is_converted(folder)
