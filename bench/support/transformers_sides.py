"""transformers on a saved model: `generate` with a static padded batch, and `generate_batch`."""

import logging
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from bench.support.sides import Prompts, fastest, timed

logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)

ATTENTIONS: Final = ("sdpa", "eager")


def load(folder: Path, device: str, dtype: str, attention: str) -> Any:
    """The model; ``dtype`` is a torch type by name."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    )
    return model.to(device).eval()


def greedy(new_tokens: int) -> Any:
    """No token ends an answer."""
    make: Any = GenerationConfig
    return make(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)


class StaticBatch:
    """`generate` on prompts that are padded on the left to one length."""

    def __init__(
        self,
        folder: Path,
        *,
        device: str,
        dtype: str,
        threads: int,
        trial: Prompts,
        new_tokens: int,
    ) -> None:
        torch.set_num_threads(threads)
        self._device = device
        self._model, told = fastest(
            [{"attention": name} for name in ATTENTIONS],
            lambda attention: load(folder, device, dtype, attention),
            lambda model: timed(lambda p, n: self._generate(model, p, n), trial, new_tokens)[0],
        )
        self.about = f"generate with {self._model.config._attn_implementation} attention ({told})"

    def run(self, prompts: Prompts, new_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds and answers."""
        return timed(lambda p, n: self._generate(self._model, p, n), prompts, new_tokens)

    @torch.inference_mode()
    def _generate(self, model: Any, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        output = model.generate(
            input_ids=torch.tensor(padded, device=self._device),
            attention_mask=torch.tensor(mask, device=self._device),
            generation_config=greedy(new_tokens),
        )
        answers: list[list[int]] = output[:, longest:].tolist()
        return answers


class ContinuousBatch:
    """`generate_batch` with a manager that stays from call to call, so that no call pays for setting it up."""

    def __init__(
        self,
        folder: Path,
        *,
        device: str,
        dtype: str,
        threads: int,
        trial: Prompts,
        new_tokens: int,
    ) -> None:
        torch.set_num_threads(threads)
        longest = max(map(len, trial)) + new_tokens
        sizes = CUDA_SIZES if device == "cuda" else CPU_SIZES
        made, told = fastest(
            [{"attention": name, **size} for name in ATTENTIONS for size in sizes],
            lambda **setting: Manager(folder, device, dtype, len(trial), longest, **setting),
            lambda manager: timed(manager.generate, trial, new_tokens)[0],
        )
        self._manager: Manager = made
        self.about = f"generate_batch ({told})"

    def run(self, prompts: Prompts, new_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds and answers."""
        return timed(self._manager.generate, prompts, new_tokens)


PAGE_TOKENS: Final = 256
"""Of a page when nothing is set."""
CPU_SIZES: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"page_size": 32, "max_batch_tokens": 1024},
    {"page_size": 64, "max_batch_tokens": 256},
    {"page_size": 64, "max_batch_tokens": 512},
)
CUDA_SIZES: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"max_batch_tokens": 4096},
    {"max_batch_tokens": 16384},
)
"""Pages are given too (`Manager`); what is not given the library works out from the memory of the device."""


class Manager:
    """A model with a manager for up to ``rows`` rows of up to ``longest`` tokens."""

    def __init__(
        self,
        folder: Path,
        device: str,
        dtype: str,
        rows: int,
        longest: int,
        *,
        attention: str,
        **size: Any,
    ) -> None:
        self._model = load(folder, device, dtype, f"paged|{attention}")
        if device == "cuda" or "page_size" in size:
            # On a GPU the library takes nearly all memory that is free: nothing is left for the next that is tried.
            size["num_blocks"] = rows * (longest // size.get("page_size", PAGE_TOKENS) + 2)
        self._config = ContinuousBatchingConfig(**size)

    def generate(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        """Answers in the order of the prompts."""
        results = self._model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=greedy(new_tokens),
            continuous_batching_config=self._config,
            persistent_manager=True,
        )
        by_prompt = {tuple(r.prompt_ids): list(r.generated_tokens) for r in results.values()}
        return [by_prompt[tuple(prompt)] for prompt in prompts]

    def close(self) -> None:
        """Frees the cache."""
        self._model.destroy_cached_continuous_batching_manager()
