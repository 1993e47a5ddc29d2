"""The shipped tiers load as stated and answer held-out tasks."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from bench.tiers.evaluate import score
from bench.tiers.tiers import TIERS
from model_workers.tiers.tasks import heldout

MODELS = Path(__file__).parents[3] / "model_workers" / "models"
BYTES_MAX = 24_000_000


@pytest.mark.parametrize("tier", TIERS)
def test_a_tier_loads_with_the_stated_shape(tier: str) -> None:
    model = LlamaForCausalLM.from_pretrained(MODELS / tier)
    want = TIERS[tier].config()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.config.max_position_embeddings == 1024
    assert model.config.num_hidden_layers == want.num_hidden_layers
    assert model.config.hidden_size == want.hidden_size
    assert model.generation_config.eos_token_id == 5
    assert all(p.isfinite().all() for p in model.parameters())


def test_both_tiers_together_stay_within_the_size_bound() -> None:
    shipped = [f for tier in TIERS for f in (MODELS / tier).iterdir()]
    assert sum(f.stat().st_size for f in shipped) <= BYTES_MAX
    assert not [f for f in shipped if f.suffix in {".pt", ".bin"}]


@pytest.mark.parametrize("tier", ["small", pytest.param("large", marks=pytest.mark.long)])
def test_a_tier_answers_as_its_table_says(tier: str) -> None:
    # docs/concepts/tiers.md: 97 to 100 % but for the small tier's hard sorts, 34 %, and totals, 0 %. One miss in 16 is
    # chance.
    tokenizer = AutoTokenizer.from_pretrained(MODELS / tier)
    model = LlamaForCausalLM.from_pretrained(MODELS / tier, dtype=torch.bfloat16).eval()
    for (kind, level), right in score(model, tokenizer, heldout(16, 11)).items():
        if level == "easy" or tier == "large":
            assert right >= 15 / 16
        else:
            assert right == 0 if kind == "total" else 0.1 < right < 0.6
