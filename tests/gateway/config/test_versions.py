"""A version is that of the whole content, and a large file is read once."""

import json
import os
from pathlib import Path

import pytest

from gateway.config import models
from gateway.config.models import ModelFolder, content_hash
from sluice.settings import ModelSettings
from tests.gateway.kit.tokenizer import write_model
from tests.support.tiny_encoders import add_modules

LATER = 4e9
"""A time at which every file has changed long ago."""
SIZE = 2_000_000


@pytest.fixture(autouse=True)
def _own_cache() -> None:
    models.cached_hash.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with weights."""
    made = write_model(tmp_path / "m")
    (made / "model.safetensors").write_bytes(bytes(SIZE))
    return made


def change(file: Path, place: int) -> None:
    """One byte of it, in place; its size and modification time stay."""
    seen = file.stat()
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(b"x")
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def version(folder: Path, *, whole: bool = True, **fields: object) -> str:
    model = ModelSettings.model_validate({"name": "m", "path": str(folder), **fields})
    return ModelFolder(model).version(whole=whole)


def test_every_byte_of_the_weights_counts(folder: Path) -> None:
    found = {version(folder)}
    for place in (0, 100_000, SIZE - 1):
        change(folder / "model.safetensors", place)
        found.add(version(folder))
    assert len(found) == 4


def test_without_cached_answers_weights_count_by_size(folder: Path) -> None:
    before = version(folder, whole=False)
    (folder / "model.safetensors").write_bytes(b"1" * SIZE)
    assert version(folder, whole=False) == before
    (folder / "model.safetensors").write_bytes(bytes(SIZE - 1))
    shorter = version(folder, whole=False)
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert len({before, shorter, version(folder, whole=False)}) == 3


def test_equal_files_elsewhere_have_equal_hashes(folder: Path, tmp_path: Path) -> None:
    """Gateways on several machines compare versions, and share kept answers."""
    copy = tmp_path / "copy"
    copy.write_bytes(bytes(SIZE))
    assert content_hash(copy, LATER) == content_hash(folder / "model.safetensors", LATER)


def test_a_large_file_is_read_once_unless_it_changes(folder: Path) -> None:
    file = folder / "model.safetensors"
    # A change of a moment ago may be followed by another one at the same time.
    hashes = [content_hash(file, file.stat().st_ctime + 1.0)]
    assert models.cached_hash.cache_info().misses == 0
    hashes += [content_hash(file, LATER), content_hash(file, LATER)]
    change(file, 5)
    assert content_hash(file, LATER) not in hashes
    assert len(set(hashes)) == 1
    assert models.cached_hash.cache_info().misses == 2


def test_a_file_of_the_hub_is_called_by_its_hash(tmp_path: Path) -> None:
    blob = tmp_path / "models--a--b" / "blobs" / ("0" * 63 + "1")
    blob.parent.mkdir(parents=True)
    blob.write_bytes(bytes(10))
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
