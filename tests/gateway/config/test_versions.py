"""A version is that of the whole content, and a large file is read once."""

import json
import os
from pathlib import Path

import pytest

from gateway.config import models
from gateway.config.models import PART_BYTES, ModelFolder, content_hash
from sluice.settings import ModelSettings
from tests.gateway.kit.tokenizer import write_model
from tests.support.tiny_encoders import add_modules

LATER = 4e9
"""A time at which every file has changed long ago."""


@pytest.fixture(autouse=True)
def _own_cache() -> None:
    models.cached_hash.cache_clear()


def reads() -> int:
    """How many files were read whose hashes are kept."""
    return models.cached_hash.cache_info().misses


def weights(folder: Path, size: int = 3 * PART_BYTES + 5) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(bytes(size))
    return file


def change(file: Path, place: int) -> None:
    """One byte of it, in place; its size and modification time stay."""
    seen = file.stat()
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(b"x")
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def version(folder: Path, **fields: object) -> str:
    kept = bool(fields.pop("kept", True))
    model = ModelSettings.model_validate({"name": "m", "path": str(folder), **fields})
    return ModelFolder(model).version(whole=kept)


def test_every_byte_of_the_weights_counts(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    file = weights(folder)
    found = {version(folder)}
    places = (0, 100_000, PART_BYTES - 1, PART_BYTES, 2 * PART_BYTES + 77, 3 * PART_BYTES + 4)
    for count, place in enumerate(places, 2):
        change(file, place)
        found.add(version(folder))
        assert len(found) == count, f"byte {place}"


def test_without_cached_answers_weights_count_by_size(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    file = weights(folder)
    before = version(folder, kept=False)
    file.write_bytes(b"1" * file.stat().st_size)
    assert version(folder, kept=False) == before
    file.write_bytes(bytes(3 * PART_BYTES))
    shorter = version(folder, kept=False)
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert len({before, shorter, version(folder, kept=False)}) == 3


def test_version_is_equal_for_equal_files_elsewhere(tmp_path: Path) -> None:
    """Gateways on several machines compare versions, and share kept answers."""
    folders = [write_model(tmp_path / place / "m") for place in ("here", "there")]
    for folder in folders:
        weights(folder)
        os.utime(folder / "config.json", (len(str(folder)), 7))
    sums = [content_hash(folder / "model.safetensors", LATER) for folder in folders]
    assert sums[0] == sums[1]


def test_a_large_file_is_read_once(tmp_path: Path) -> None:
    file = weights(tmp_path)
    found = content_hash(file, LATER)
    assert content_hash(file, LATER) == found
    assert reads() == 1
    change(file, 5)
    assert content_hash(file, LATER) != found
    assert reads() == 2


def test_what_changed_a_moment_ago_is_not_kept(tmp_path: Path) -> None:
    file = weights(tmp_path)
    content_hash(file, file.stat().st_ctime + 1.0)
    assert reads() == 0
    content_hash(file, file.stat().st_ctime + 3.0)
    assert reads() == 1


def test_a_file_of_the_hub_is_called_by_its_hash(tmp_path: Path) -> None:
    blob = tmp_path / "models--a--b" / "blobs" / ("0" * 63 + "1")
    blob.parent.mkdir(parents=True)
    blob.write_bytes(bytes(2_000_000))
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    assert content_hash(link, LATER) == blob.name


def test_the_modules_of_an_embedding_model_count(tmp_path: Path) -> None:
    folder = add_modules(write_model(tmp_path / "m"), {"pooling_mode": "mean"}, dense=4)
    before = version(folder, engine="embedding")
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    pooled = version(folder, engine="embedding")
    change(folder / "2_Dense" / "model.safetensors", 200)
    assert len({before, pooled, version(folder, engine="embedding")}) == 3
