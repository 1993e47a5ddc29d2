import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from model_workers.model_folder import INDEX, WEIGHTS, check_model
from sluice.settings import ModelSettings, Settings, SettingsError
from tests.support.tiny_models import save_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "tiny")


def model(folder: Path, **changes: object) -> ModelSettings:
    return ModelSettings.model_validate({"name": "tiny", "path": str(folder), **changes})


def cut_header(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:40])


def cut_data(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def wrong_length(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"\xff" * 64)


def more_words(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer["added_tokens"] = [{"id": 97, "content": "<more>", **flags}]
    path.write_text(json.dumps(tokenizer))


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def lost_shard(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001.safetensors"}}))


def changed(**values: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "awq": (changed(quantization_config={"quant_method": "awq"}), r"\(awq\).*serve it with vLLM"),
    "experts": (changed(num_local_experts=8), "mixture of experts.*serve it with vLLM"),
    "adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "LoRA.*with vLLM"),
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json is missing"),
    "config no JSON": (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
    "config no UTF-8": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "is not JSON"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), "JSON object"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
    "tokenizer empty": (lambda f: (f / "tokenizer.json").write_text("{}"), "not a tokenizer"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "no weights"),
    "pickled weights": (pickled, "convert them"),
    "header cut off": (cut_header, "is not whole"),
    "header length wrong": (wrong_length, "is not whole"),
    "data cut off": (cut_data, "is not whole"),
    "lost shard": (lost_shard, r"model-00001\.safetensors cannot be read"),
    "more words than sequences": (more_words, "98 tokens, but the model's embedding only 97"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_folder_is_one_line_that_names_the_model(folder: Path, name: str) -> None:
    breaks, message = BREAKS[name]
    breaks(folder)
    with pytest.raises(SettingsError, match=message) as error:
        check_model(model(folder))
    text = str(error.value)
    assert text.startswith("models: tiny: ")
    assert "\n" not in text


def test_a_whole_folder_passes(folder: Path) -> None:
    check_model(model(folder))


def test_an_echo_needs_no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    check_model(model(folder, engine="echo"))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="does not exist"):
        check_model(model(tmp_path / "nothing"))


def test_the_shipped_tiers_pass() -> None:
    for shipped in Settings().models:
        check_model(shipped)


def test_checking_does_not_import_torch() -> None:
    code = "import sys, model_workers.deploy; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_draft_with_other_tokens_is_refused_by_key(folder: Path, tmp_path: Path) -> None:
    draft = save_model(tmp_path / "draft", "gpt2")
    check_model(model(folder, draft=str(draft)))
    path = draft / "tokenizer.json"
    path.write_text(path.read_text().replace('"w5"', '"other"'))
    with pytest.raises(SettingsError, match=r"models: tiny: draft: .* has other tokens"):
        check_model(model(folder, draft=str(draft)))


def test_a_broken_draft_is_named_as_such(folder: Path, tmp_path: Path) -> None:
    draft = save_model(tmp_path / "draft")
    (draft / "config.json").unlink()
    with pytest.raises(SettingsError, match=r"models: tiny: draft: .*config\.json is missing"):
        check_model(model(folder, draft=str(draft)))
