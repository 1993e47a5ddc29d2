"""Batches hold what they should, the schedule has its shape, and a killed run goes on."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.tiers.tiers import TIERS, TierSpec, TrainingPhase
from bench.tiers.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from bench.tiers.train import IGNORED, TierTraining, TrainingData, schedule

MIX = TIERS["small"].phases[0].mix
TINY = TierSpec(
    "tiny", 16, 1, 2, 16, (TrainingPhase(2, MIX), TrainingPhase(2, MIX)), examples_per_step=4
)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(n_per_cell=100), folder)
    return folder


def test_a_feed_is_a_function_of_its_seed_and_keeps_to_its_size(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    first, again = (
        next(TrainingData(tokenizer, MIX, 16, seed=3).steps(tokens_max=512)) for _ in range(2)
    )
    assert sum(len(ids) for ids, _ in first) == 16
    assert all(ids.numel() <= 512 for ids, _ in first)
    for (ids, labels), (ids_again, labels_again) in zip(first, again, strict=True):
        assert torch.equal(ids, ids_again)
        assert torch.equal(labels, labels_again)


def test_loss_is_taken_on_answers_and_their_end_only(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    feed = TrainingData(tokenizer, {("classify", "easy"): 1}, 8, seed=0)
    for ids, labels in next(feed.steps(tokens_max=4096)):
        assert torch.equal(ids[labels != IGNORED], labels[labels != IGNORED])
        said = tokenizer.decode(labels[labels != IGNORED].tolist())
        assert said.count("<|end|>") >= len(ids)
        assert "<|user|>" not in said


def test_the_schedule_warms_up_holds_and_ends_at_zero() -> None:
    tier = replace(TINY, phases=(TrainingPhase(600, MIX), TrainingPhase(400, MIX, (1, 0))))
    rates = [schedule(step, tier) for step in range(1001)]
    assert rates[0] == pytest.approx(0.01)
    assert set(rates[100:601]) == {1.0}
    assert rates[1000] == 0.0
    assert rates[600:] == sorted(rates[600:], reverse=True)


def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path: Path, tokenizer_folder: Path) -> None:
    torch.set_num_threads(1)
    killed = replace(TINY, phases=(TrainingPhase(2, MIX),))
    TierTraining(killed, tmp_path, tokenizer_folder).train(watch_every=2, watch_n=0)
    resumed = TierTraining(TINY, tmp_path, tokenizer_folder)
    assert resumed.step == 2
    resumed.train(watch_every=2, watch_n=0)
    assert TierTraining(TINY, tmp_path, tokenizer_folder).step == 4
    assert (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "tokenizer.json").exists()
