"""Measure a model folder on the held-out tasks: `python -m bench.tiers.evaluate DIR`.

Runs transformers in bfloat16, or with --served the worker's engine (--dtype, --quantization, --kv-cache-dtype).
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from bench.tiers.tokenizer import load_tokenizer
from model_workers.engine.forward import load_model
from model_workers.engine.paged_model import SequenceChunk
from model_workers.tiers.example import Cell, Example
from model_workers.tiers.tasks import heldout

BLOCK_TOKENS = 32


class ServedModel:
    """A model folder on a CPU."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str,
        quantization: str,
        rows: int = 64,
    ) -> None:
        loaded = load_model(
            str(folder),
            device="cpu",
            dtype=dtype,
            quantization=quantization,
        )
        self._row_blocks = -(-loaded.context_tokens // BLOCK_TOKENS)
        self._model = loaded.paged(rows * self._row_blocks, BLOCK_TOKENS)
        self._rows = rows

    def answers(self, tokenizer: PreTrainedTokenizerFast, examples: list[Example]) -> list[str]:
        """One per example, in their order."""
        texts: list[str] = []
        for start in range(0, len(examples), self._rows):
            texts += self._batch(tokenizer, examples[start : start + self._rows])
        return texts

    def _batch(self, tokenizer: PreTrainedTokenizerFast, examples: list[Example]) -> list[str]:
        prompts = [_prompt(tokenizer, example) for example in examples]
        found: list[list[int]] = [[] for _ in examples]
        running = list(range(len(examples)))
        while running:
            chunks = [self._chunk(row, prompts[row], found[row]) for row in running]
            for row, token in zip(
                running, self._model.forward(chunks).argmax(-1).tolist(), strict=True
            ):
                found[row].append(token)
            running = [
                row
                for row in running
                if found[row][-1] != tokenizer.eos_token_id
                and len(found[row]) < examples[row].max_tokens
            ]
        return [str(tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in found]

    def _chunk(self, row: int, prompt: list[int], found: list[int]) -> SequenceChunk:
        blocks = range(row * self._row_blocks, (row + 1) * self._row_blocks)
        if not found:
            return SequenceChunk(prompt, 0, blocks, 1)
        return SequenceChunk(found[-1:], len(prompt) + len(found) - 1, blocks, 1)


def _prompt(tokenizer: PreTrainedTokenizerFast, example: Example) -> list[int]:
    turns = [{"role": "user", "content": example.prompt}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(str(text), add_special_tokens=False)["input_ids"])


Scores = dict[Cell, float]


def load(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model of a folder, in bfloat16, and its tokenizer."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.eval()  # type: ignore[no-untyped-call]
    return model, load_tokenizer(folder)


def answers(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    examples: list[Example],
    batch: int = 64,
) -> list[str]:
    """Greedy answers through transformers, in batches, in the order of `examples`."""
    tokenizer.padding_side = "left"
    texts: list[str] = []
    for start in range(0, len(examples), batch):
        part = examples[start : start + batch]
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": e.prompt}], tokenize=False, add_generation_prompt=True
            )
            for e in part
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        inputs.pop("token_type_ids", None)
        with torch.inference_mode():
            out = model.generate(  # type: ignore[misc]
                **inputs, do_sample=False, max_new_tokens=max(e.max_tokens for e in part)
            )
        width = inputs["input_ids"].shape[1]
        texts += tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
    return texts


def score(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: list[Example]
) -> Scores:
    """The share of right answers of transformers' model, cell by cell."""
    return score_answers(lambda group: answers(model, tokenizer, group), examples)


def score_answers(answer: Callable[[list[Example]], list[str]], examples: list[Example]) -> Scores:
    """The share of right answers, cell by cell."""
    by_cell: dict[Cell, list[Example]] = {}
    for example in examples:
        by_cell.setdefault((example.kind, example.level), []).append(example)
    scores: Scores = {}
    for cell, group in by_cell.items():
        graded = [e.grade(t) for e, t in zip(group, answer(group), strict=True)]
        scores[cell] = sum(graded) / len(group)
    return scores


def table(scores: Scores) -> str:
    """The scores as a table of text."""
    rows = [f"{kind:<10}{level:<8}{share:7.1%}" for (kind, level), share in scores.items()]
    return "\n".join([f"{'kind':<10}{'level':<8}{'right':>7}", *rows])


def main() -> None:
    """Print the table of one model folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--n", type=int, default=200, help="examples per cell")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--served", action="store_true", help="as a worker computes it")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--quantization", choices=["none", "int8", "fp8"], default="none")
    args = parser.parse_args()
    examples = heldout(args.n, args.seed)
    model, tokenizer = load(args.folder)
    began = time.monotonic()
    if args.served:
        served = ServedModel(
            args.folder,
            dtype=args.dtype,
            quantization=args.quantization,
        )
        scores = score_answers(lambda group: served.answers(tokenizer, group), examples)
    else:
        scores = score(model, tokenizer, examples)
    print(table(scores))
    print(f"{args.n} examples a cell, seed {args.seed}, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
