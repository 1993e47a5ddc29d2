"""A GGUF file becomes a folder in Hugging Face layout with the same weights, tokenizer and template."""

import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from model_workers.gguf_conversion import GgufFile, check_room, convert, read_header
from model_workers.model_folder import check_model
from sluice.settings import ModelSettings, SettingsError, resolve_model_path
from sluice.settings.model_cache import MARKER, is_converted
from tests.support.gguf_model import write_gguf

SMALL = Path(resolve_model_path("builtin:small"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small specialist as a GGUF file."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", SMALL)


@pytest.fixture(scope="module")
def folder(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its conversion."""
    folder = tmp_path_factory.mktemp("cache") / "converted" / "model"
    convert(file, folder)
    return folder


def test_conversion_keeps_every_weight(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file

    before, after = (load_file(one / "model.safetensors") for one in (SMALL, folder))
    assert before.keys() == after.keys()
    assert all(after[name].dtype == torch.bfloat16 for name in after)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_conversion_keeps_the_configuration(folder: Path) -> None:
    before, after = (json.loads((one / "config.json").read_text()) for one in (SMALL, folder))
    assert "quantization_config" not in after
    for key in (
        *("architectures", "hidden_size", "num_hidden_layers", "num_key_value_heads"),
        *("max_position_embeddings", "tie_word_embeddings", "vocab_size", "eos_token_id"),
    ):
        assert after[key] == before[key], key
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == before["eos_token_id"]


def test_conversion_keeps_tokenizer_and_template(folder: Path) -> None:
    before, after = (Tokenizer.from_file(str(one / "tokenizer.json")) for one in (SMALL, folder))
    assert after.get_vocab() == before.get_vocab()
    text = "Which label fits Grüße 東京 😀"  # how words are cut is transformers' choice, not the file's
    encoded = [one.encode(text, add_special_tokens=False).ids for one in (before, after)]
    assert encoded[0] == encoded[1]
    assert after.decode(encoded[1]) == text
    template = json.loads((SMALL / "tokenizer_config.json").read_text())["chat_template"]
    assert (folder / "chat_template.jinja").read_text() == template


def test_a_converted_folder_can_be_served(folder: Path) -> None:
    assert is_converted(folder)
    assert {one.name for one in folder.iterdir()} - {MARKER} == set(
        json.loads((folder / MARKER).read_text())
    )
    check_model(ModelSettings(name="m", path=str(folder)))


def test_a_second_conversion_changes_nothing(file: Path, folder: Path) -> None:
    seen = (folder / MARKER).stat()
    convert(file, folder)
    assert (folder / MARKER).stat() == seen


def test_a_damaged_folder_is_converted_again(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for left in (folder, tmp_path / "model.partial"):
        left.mkdir()
        (left / "config.json").write_text("{}")
    convert(file, folder)
    assert is_converted(folder)
    assert not (tmp_path / "model.partial").exists()


def test_a_conversion_waits_for_another_one(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    command = [sys.executable, "-m", "model_workers.gguf_conversion", "none.gguf", str(folder)]
    with (tmp_path / "model.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with subprocess.Popen(command) as process:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=2)
            folder.mkdir()
            (folder / MARKER).write_text("{}")
            fcntl.flock(held, fcntl.LOCK_UN)
            assert process.wait(timeout=60) == 0  # did not read the file, which is not there


def _cut(file: Path, to: Path) -> None:
    to.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _metadata(architecture: str, **fields: int) -> Callable[[Path, Path], None]:
    def write(_: Path, to: Path) -> None:
        import gguf

        writer: Any = gguf.GGUFWriter(to, architecture)
        for name, value in fields.items():
            writer.add_uint16(name.replace("_", "."), value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return write


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda _, to: to.write_bytes(b""), "is not a GGUF file"),
        (lambda _, to: to.write_bytes(b"PK\3\4zip"), "is not a GGUF file"),
        (lambda _, to: to.write_bytes(b"GGUF"), "is not whole"),
        (lambda _, to: to.write_bytes(b"GGUF" + bytes(range(256)) * 9), "is not whole"),
        (_cut, "is not whole"),
        (_metadata("llama", split_count=3), "is one of 3 parts; merge them"),
        (
            _metadata("hyperllm"),
            r"transformers does not convert the architecture hyperllm .*; serve it with llama\.cpp",
        ),
        (_metadata("clip"), "does not convert the architecture clip"),
    ],
)
def test_conversion_says_why_it_fails(
    write: Callable[[Path, Path], None], problem: str, file: Path, tmp_path: Path
) -> None:
    given = tmp_path / "given.gguf"
    write(file, given)
    with pytest.raises(SettingsError, match=problem):
        convert(given, tmp_path / "out" / "model")
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["model.lock"]


def test_header_without_the_package_names_the_extra(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(SettingsError, match=r"pip install 'gguf>=0\.19' \(extra chat\)"):
        read_header(file)


def test_conversion_checks_memory_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seven = GgufFile(tmp_path / "7b.gguf", "llama", 7_000_000_000)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=16 * 10**9))
    with pytest.raises(SettingsError, match=r"needs 28\.60 GB of memory and 16\.00 GB are free"):
        check_room(seven, tmp_path)


def test_conversion_checks_the_disk_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seven = GgufFile(tmp_path / "1b.gguf", "llama", 1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**8))
    with pytest.raises(SettingsError, match=r"needs 0\.10 GB on the disk of .* 0\.10 GB are free"):
        check_room(seven, tmp_path)
