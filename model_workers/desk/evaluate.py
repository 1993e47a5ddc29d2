"""Measure a model folder on the held-out tasks: `python -m model_workers.desk.evaluate DIR`."""

import argparse
import time
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from model_workers.desk.example import Cell, Example
from model_workers.desk.tasks import heldout
from model_workers.desk.tokenizer import load_tokenizer

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
    """The share of right answers, cell by cell."""
    by_cell: dict[Cell, list[Example]] = {}
    for example in examples:
        by_cell.setdefault((example.kind, example.level), []).append(example)
    scores: Scores = {}
    for cell, group in by_cell.items():
        texts = answers(model, tokenizer, group)
        scores[cell] = sum(e.grade(t) for e, t in zip(group, texts, strict=True)) / len(group)
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
    args = parser.parse_args()
    model, tokenizer = load(args.folder)
    began = time.monotonic()
    print(table(score(model, tokenizer, heldout(args.n, args.seed))))
    print(f"{args.n} examples a cell, seed {args.seed}, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
