"""Train the tiers: `python -m bench.tiers.train --tier all --out DIR`.

One command makes the tokenizer and the weights from nothing but a seed. Killed, it continues from its last checkpoint
(`DIR/<tier>/checkpoint.pt`) when started again.

Matrices are trained with Muon, embeddings and norms with AdamW; the learning rate warms up, holds and falls to zero
over the last part. A step is a list of micro-batches: conversations as token ids, padded in groups of like length.
"""

import argparse
import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from random import Random
from typing import Final

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from bench.tiers.evaluate import score
from bench.tiers.tiers import TIERS, TierSpec
from bench.tiers.tokenizer import (
    SYSTEM_TURNS,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from model_workers.tiers.example import Cell, Example
from model_workers.tiers.tasks import heldout, stream

IGNORED: Final = -100  # the label of a token no loss is taken on
_SYSTEM_SHARE: Final = 0.1
_SECOND_TURN_SHARE: Final = 0.06

Conversation = tuple[list[int], list[int]]  # token ids and the label of each
TrainingStep = list[tuple[torch.Tensor, torch.Tensor]]  # micro-batches of the same


class TrainingData:
    """An endless, seeded supply of steps; each is a list of (ids, labels) micro-batches."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, mix: Mapping[Cell, float], size: int, seed: int
    ) -> None:
        self._encode = tokenizer.backend_tokenizer.encode
        self._examples = stream(seed, mix)
        self._rng = Random(f"feed {seed}")
        self._size = size

    def steps(self, tokens_max: int) -> Iterator[TrainingStep]:
        """Steps of `size` conversations, in micro-batches of at most `tokens_max` padded tokens."""
        while True:
            conversations = [self._conversation() for _ in range(self._size)]
            conversations.sort(key=lambda c: len(c[0]))
            yield [_pad(group) for group in _groups(conversations, tokens_max)]

    def _conversation(self) -> Conversation:
        text = "<|bos|>"
        if self._rng.random() < _SYSTEM_SHARE:
            text += f"<|system|>{self._rng.choice(SYSTEM_TURNS)}<|end|>"
        ids = self._ids(text)
        labels = [IGNORED] * len(ids)
        self._add_turn(ids, labels, next(self._examples))
        while self._rng.random() < _SECOND_TURN_SHARE:
            self._add_turn(ids, labels, next(self._examples))
        return ids, labels

    def _add_turn(self, ids: list[int], labels: list[int], example: Example) -> None:
        asked = self._ids(f"<|user|>{example.prompt}<|end|><|assistant|>")
        said = self._ids(f"{example.answer}<|end|>")
        ids += asked + said
        labels += [IGNORED] * len(asked) + said

    def _ids(self, text: str) -> list[int]:
        return list(self._encode(text).ids)


def _groups(conversations: list[Conversation], tokens_max: int) -> Iterator[list[Conversation]]:
    group: list[Conversation] = []
    for conversation in conversations:  # by length: the newest is the longest of its group
        if group and (len(group) + 1) * len(conversation[0]) > tokens_max:
            yield group
            group = []
        group.append(conversation)
    yield group


def _pad(group: list[Conversation]) -> tuple[torch.Tensor, torch.Tensor]:
    # Padding is on the right, where causal attention never looks: no mask is needed.
    width = len(group[-1][0])
    ids = torch.tensor([c[0] + [0] * (width - len(c[0])) for c in group])
    labels = torch.tensor([c[1] + [IGNORED] * (width - len(c[1])) for c in group])
    return ids, labels


_TOKENS_PER_MICRO_BATCH = 2048
_MUON_LR, _ADAM_LR = 0.015, 3e-3
_WARM_UP_STEPS = 100
# Progress is measured with a seed of its own, so that the reported table is on fresh held-out tasks.
_WATCH_SEED = 77


class TierTraining:
    """The training of one tier: model, optimizers and the step reached."""

    def __init__(self, tier: TierSpec, folder: Path, tokenizer_folder: Path) -> None:
        self.tier = tier
        self.folder = folder
        self.tokenizer_folder = tokenizer_folder
        self.tokenizer = load_tokenizer(tokenizer_folder)
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(tier.config())
        # On CPU the backward pass of the fused attention takes longer than all the rest.
        self.model.set_attn_implementation("eager")
        matrices = [p for n, p in self.model.named_parameters() if "_proj" in n]
        others = [p for n, p in self.model.named_parameters() if "_proj" not in n]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=_MUON_LR, weight_decay=0.01),
            torch.optim.AdamW(others, lr=_ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.base_rates = (_MUON_LR, _ADAM_LR)
        self.step = 0
        self.seconds = 0.0
        if self._checkpoint.exists():
            self._resume()

    @property
    def _checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def train(self, watch_every: int, watch_n: int) -> None:
        """Run to the tier's last step; log, watch and checkpoint every `watch_every` steps."""
        began = time.monotonic() - self.seconds
        losses: deque[float] = deque(maxlen=100)
        for micro_batches in self._batches():
            losses.append(self._update(micro_batches))
            self.seconds = time.monotonic() - began
            if self.step % 100 == 0:
                loss = sum(losses) / len(losses)
                print(
                    f"{self.tier.name} step {self.step} loss {loss:.4f} {self.seconds:.0f} s",
                    flush=True,
                )
            if self.step % watch_every == 0 or self.step == self.tier.steps:
                self.save()
                self._watch(watch_n)

    def _batches(self) -> Iterator[TrainingStep]:
        # The seed of a feed follows the step it starts at: a resumed run sees fresh examples.
        end = 0
        for phase in self.tier.phases:
            end += phase.steps
            feed = TrainingData(
                self.tokenizer, phase.mix, self.tier.examples_per_step, 1000 + self.step
            )
            yield from islice(feed.steps(_TOKENS_PER_MICRO_BATCH), max(0, end - self.step))

    def save(self) -> None:
        """Write the checkpoint, and the model folder as it would ship."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
        }
        fresh = self._checkpoint.with_suffix(".new")
        torch.save(state, fresh)
        fresh.replace(self._checkpoint)
        self.shipped().save_pretrained(self.folder)
        for file in self.tokenizer_folder.iterdir():
            shutil.copyfile(file, self.folder / file.name)

    def shipped(self) -> LlamaForCausalLM:
        """A copy of the model as it ships: bfloat16, in evaluation mode."""
        copy = LlamaForCausalLM(self.tier.config())
        copy.load_state_dict(self.model.state_dict())
        for parameter in copy.parameters():
            parameter.data = parameter.data.bfloat16()
        copy.eval()  # type: ignore[no-untyped-call]
        return copy

    def _resume(self) -> None:
        state = torch.load(self._checkpoint)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]

    def _update(self, micro_batches: TrainingStep) -> float:
        for optimizer, rate in zip(self.optimizers, self.base_rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule(self.step, self.tier)
        targets = sum(int((labels != IGNORED).sum()) for _, labels in micro_batches)
        loss = sum(self._backward(ids, labels, targets) for ids, labels in micro_batches)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss

    def _backward(self, ids: torch.Tensor, labels: torch.Tensor, targets: int) -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.model.model(ids[:, :-1], use_cache=False).last_hidden_state
            # Only answer tokens are scored: the others never reach the vocabulary product.
            asked = labels[:, 1:] != IGNORED
            logits = self.model.lm_head(hidden[asked])
        loss = functional.cross_entropy(logits.float(), labels[:, 1:][asked], reduction="sum")
        (loss / targets).backward()  # type: ignore[no-untyped-call]
        return loss.item() / targets

    def _watch(self, n: int) -> None:
        scores = score(self.shipped(), self.tokenizer, heldout(n, _WATCH_SEED))
        line = "  ".join(f"{kind}/{level} {s:.0%}" for (kind, level), s in scores.items())
        print(f"{self.tier.name} step {self.step} held-out: {line}", flush=True)


def schedule(step: int, tier: TierSpec) -> float:
    """The share of the full learning rate at `step`: warm up, then what the phases say."""
    warm_up = min(1.0, (step + 1) / _WARM_UP_STEPS)
    for phase in tier.phases:
        if step < phase.steps:
            first, last = phase.rates
            return warm_up * (first + (last - first) * step / phase.steps)
        step -= phase.steps
    return 0.0


def main() -> None:
    """Train what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--tier", choices=(*TIERS, "all"), default="all")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--watch-every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--watch-n", type=int, default=50, help="held-out examples a cell")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    shared = args.out / "tokenizer"
    if not (shared / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(), shared)
    for name in TIERS if args.tier == "all" else (args.tier,):
        TierTraining(TIERS[name], args.out / name, shared).train(args.watch_every, args.watch_n)


if __name__ == "__main__":
    main()
