"""What a reload does before gateways are asked; `tests/mesh/test_reload.py` has the whole of it."""

import time
from pathlib import Path

import pytest

from gateway.config import file_hashes
from gateway.config.file_hashes import content_hash
from sluice.settings import ModelSettings
from supervisor.reload import _hash_files
from supervisor.versions import Version


def test_hashes_of_new_models_are_there_when_gateways_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(file_hashes, "SETTLED_S", 0.0)
    folder = tmp_path / "m"
    folder.mkdir()
    file = folder / "model.safetensors"
    file.write_bytes(bytes(2_000_000))
    models = (ModelSettings(name="m", path=str(folder)), ModelSettings(name="h", path="of/the-hub"))
    _hash_files([Version(model, "", model, ()) for model in models])
    monkeypatch.setattr(file_hashes, "_known", {})  # a gateway is another process
    monkeypatch.setattr(file_hashes, "_read", lambda *_: pytest.fail("it was read again"))
    assert content_hash(file, time.time())
