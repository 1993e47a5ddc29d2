"""What makes another version of a model, and what tells changed weights."""

import json
import os
from pathlib import Path

from gateway.config.models import ModelFolder
from sluice.settings import ModelSettings
from tests.gateway.kit.tokenizer import write_model
from tests.support.tiny_encoders import add_modules


def weights(folder: Path, size: int = 100_000) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(bytes(size))
    return file


def change(file: Path, place: int) -> None:
    """One byte of it, in place; its size and modification time stay."""
    seen = file.stat()
    while file.stat().st_ctime_ns == seen.st_ctime_ns:
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(b"x")
        os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def folder_of(path: Path, **fields: object) -> ModelFolder:
    return ModelFolder(ModelSettings.model_validate({"name": "m", "path": str(path), **fields}))


def test_any_change_of_weights_is_noticed(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    file = weights(folder)
    before = folder_of(folder)
    kept = before.version, before.weights
    assert (folder_of(folder).version, folder_of(folder).weights) == kept
    change(file, 99_999)
    assert folder_of(folder).version == kept[0]
    assert folder_of(folder).weights != kept[1]


def test_weights_count_by_size_and_files_by_content(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    weights(folder)
    before = folder_of(folder).version
    weights(folder, 99_999)
    shorter = folder_of(folder).version
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert len({before, shorter, folder_of(folder).version}) == 3


def test_the_modules_of_an_embedding_model_count(tmp_path: Path) -> None:
    folder = add_modules(write_model(tmp_path / "m"), {"pooling_mode": "mean"}, dense=4)
    before = folder_of(folder, engine="embedding").version
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    pooled = folder_of(folder, engine="embedding")
    version, of_weights = pooled.version, pooled.weights
    assert version != before
    change(folder / "2_Dense" / "model.safetensors", 200)
    assert folder_of(folder, engine="embedding").weights != of_weights
