"""Greedy answers of a model folder as a worker computes them: its numbers, its 8-bit weights."""

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from model_workers.engine.forward import load_model
from model_workers.engine.paged_model import RowChunk
from model_workers.tiers.example import Example

BLOCK_TOKENS = 32


class ServedModel:
    """A model folder on a CPU."""

    def __init__(self, folder: Path, *, dtype: str, quantization: str, rows: int = 64) -> None:
        loaded = load_model(str(folder), device="cpu", dtype=dtype, quantization=quantization)
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

    def _chunk(self, row: int, prompt: list[int], found: list[int]) -> RowChunk:
        blocks = range(row * self._row_blocks, (row + 1) * self._row_blocks)
        if not found:
            return RowChunk(prompt, 0, blocks, 1)
        return RowChunk(found[-1:], len(prompt) + len(found) - 1, blocks, 1)


def _prompt(tokenizer: PreTrainedTokenizerFast, example: Example) -> list[int]:
    turns = [{"role": "user", "content": example.prompt}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(str(text), add_special_tokens=False)["input_ids"])
