import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    GptOssConfig,
    MptConfig,
)

from model_workers.engine.forward import load_model
from model_workers.engine.forward.attention import CachedModel
from model_workers.engine.paged_model import SequenceChunk
from sluice.settings import SettingsError
from tests.support.tiny_models import save_model

REFUSED = {
    "bloom": BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=4),
    "falcon": FalconConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4
    ),
    "mpt": MptConfig(vocab_size=97, d_model=32, n_layers=1, n_heads=4, max_seq_len=64),
    "gpt-oss": GptOssConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_attention_that_has_no_pages_is_refused(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    AutoModelForCausalLM.from_config(REFUSED[name]).save_pretrained(tmp_path)
    with pytest.raises(
        SettingsError, match=r"attention|keys and values|without a mask|mixture of experts"
    ) as error:
        load_model(str(tmp_path), device="cpu", context_tokens=64)
    assert "set `engine: generate`" in str(error.value)


@pytest.mark.parametrize("kind", ["mamba", "qwen3_next", "t5"])
def test_other_models_are_refused_before_reading_weights(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    with pytest.raises(SettingsError, match=r"cannot be served|encoder-decoder") as error:
        load_model(str(tmp_path))
    assert "set `engine: generate`" in str(error.value)


@pytest.mark.parametrize("method", ["awq", "gptq", "torchao", "compressed-tensors", "bitsandbytes"])
def test_quantized_weights_are_refused(method: str, tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": method, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        SettingsError, match=rf"quantized weights \({method}\).*; serve it with vLLM"
    ):
        load_model(str(tmp_path))


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_sharded_folders_are_the_same_model(family: str, tmp_path: Path) -> None:
    whole = save_model(tmp_path / "whole", family)
    model = AutoModelForCausalLM.from_pretrained(whole, dtype="auto")
    model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    expected, found = (
        load_model(str(folder), device="cpu")
        .paged(8, 32)
        .forward([SequenceChunk(range(9), 0, (0,), 9)])
        for folder in (whole, tmp_path / "parts")
    )
    assert torch.equal(expected, found)


def test_no_model_at_all_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as error:
        load_model(str(tmp_path))
    assert "\n" not in str(error.value)


def test_fp8_needs_a_device_that_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(
        SettingsError, match=r"fp8 needs a device of compute capability 8\.9, .* 8\.0"
    ):
        load_model(str(save_model(tmp_path)), device="cuda", quantization="fp8")


def nearly(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The difference as a share."""
    return float((exact - found).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())


def logits_of(folder: Path | str, **options: str) -> torch.Tensor:
    loaded = load_model(str(folder), device="cpu", context_tokens=64, **options)
    return loaded.paged(4, 32).forward([SequenceChunk(range(50), 0, (0, 1), 50)])


def in_blocks(weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in 8-bit floats, and a scale for each square of it."""
    rows, columns = (side // size for side in weight.shape)
    squares = weight.float().view(rows, size, columns, size)
    scales = squares.abs().amax((1, 3), keepdim=True) / 448
    return (squares / scales).view(weight.shape).to(torch.float8_e4m3fn), scales.view(rows, columns)


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_a_checkpoint_in_fp8_is_made_wide(family: str, tmp_path: Path) -> None:
    """As DeepSeek and Qwen publish theirs."""
    exact = logits_of(save_model(tmp_path, family))
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rounded, scales = in_blocks(tensors[name], 16)
        tensors[name], tensors[f"{name}_scale_inv"] = rounded, scales
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = logits_of(tmp_path)
    assert 0 < nearly(found, exact) < 0.1
    assert nearly(logits_of(tmp_path, quantization="fp8"), exact) < 0.15


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_eight_bit_weights_answer_nearly_the_same(
    family: str, quantization: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path, family)
    assert 0 < nearly(logits_of(folder, quantization=quantization), logits_of(folder)) < 0.15


def test_the_size_of_a_block_is_what_its_tensors_take(tmp_path: Path) -> None:
    loaded = load_model(str(save_model(tmp_path, "llama")), device="cpu")
    model = loaded.paged(8, 32)
    assert isinstance(model, CachedModel)
    cache = model._attention.cache
    assert loaded.bytes_per_block(32) * 8 == sum(one.nbytes for one in (*cache.keys, *cache.values))
