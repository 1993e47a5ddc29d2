"""What is read without transformers is what transformers reads, and anything unusual is left to it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from model_workers.engine.forward import fused_folder, hub, load_model
from model_workers.engine.forward.fused_folder import FusedWeights, read_config, read_folder
from model_workers.engine.forward.llama import FusedModel
from tests.support.tiny_models import CONTEXT, save_model

CPU = torch.device("cpu")


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def read(folder: Path) -> FusedWeights | None:
    config = read_config(str(folder))
    return None if config is None else read_folder(str(folder), config, torch.float32, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_same_numbers_as_transformers(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    path = str(save_model(tmp_path, kind, sliding_window=None))
    config = read_config(path)
    assert config is not None
    ours = read_folder(path, config, dtype, CPU)
    assert ours is not None
    theirs, shapes = hub.read_weights(path, hub.read_config(path), dtype, CPU, "none", CONTEXT)
    assert ours.shapes == shapes
    assert torch.equal(ours.inv_freq, theirs.model.rotary_emb.inv_freq)
    assert ours.attention_scaling == theirs.model.rotary_emb.attention_scaling
    expected = FusedWeights.of(theirs, shapes)
    assert ours.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(ours.tensors[name], tensor), name
    for layer in theirs.model.layers:
        assert layer.self_attn.scaling == ours.shapes[0].key_size ** -0.5
        assert layer.input_layernorm.variance_epsilon == ours.config["rms_norm_eps"]


@pytest.mark.parametrize(
    "values",
    [
        {"architectures": ["GemmaForCausalLM"]},
        {"hidden_act": "gelu"},
        {"quantization_config": {"bits": 4}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"sliding_window": 16},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"num_key_value_heads": None},
        {"attention_bias": True},
        {"tie_word_embeddings": None},
        {"vocab_size": 77},
    ],
)
def test_what_is_not_known_for_certain_is_left_to_transformers(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    folder = save_model(tmp_path, "llama")
    assert read(folder) is not None
    change(folder, **values)
    assert read(folder) is None


def test_unexpected_tensors_are_left_to_transformers(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "llama")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.other.weight": torch.zeros(1)}, file)
    assert read(folder) is None
    file.write_bytes(b"no tensors")
    assert read(folder) is None
    file.unlink()
    assert read(folder) is None


def test_a_known_folder_makes_a_fused_model(tmp_path: Path) -> None:
    loaded = load_model(str(save_model(tmp_path, "llama")), device="cpu")
    assert isinstance(loaded._model, FusedWeights)
    assert isinstance(loaded.paged(64, loaded.block_tokens()), FusedModel)


def test_weights_go_straight_to_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(save_model(tmp_path, "llama"))
    config = read_config(path)
    assert config is not None
    asked = []

    def opened(file: Path, framework: str, device: str) -> Any:
        asked.append(device)
        return safe_open(file, framework=framework, device="cpu")

    monkeypatch.setattr(fused_folder, "safe_open", opened)
    cuda = torch.device("cuda", 1)
    read_folder(path, config, torch.float32, cuda)
    assert asked == ["cuda:1"]
    assert hub._placed(path, None, cuda, 1) == {"device_map": {"": cuda}}
