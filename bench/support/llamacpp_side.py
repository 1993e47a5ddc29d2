"""llama.cpp decoding a batch: its own continuous batching, through the low-level API of llama-cpp-python.

What llama.cpp's server does per step is done here: one `llama_decode` over one token of every row, prompts packed into
batches of up to ``n_batch`` tokens, greedy tokens by one argmax over all rows.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import llama_cpp
import numpy as np

from bench.support.sides import Prompts, fastest, timed

CELLS: Final = 8192
"""Tokens that the cache holds, all rows together."""
BATCH_TOKENS: Final = 2048


SETTINGS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"flash_attn_type": 0},
    {"kv_unified": True},
    {"n_ubatch": BATCH_TOKENS},
    {"n_ubatch": 128},
    {"n_threads": 1},
)
"""Fields of ``llama_context_params`` beside what is common to all."""


class LlamaCppSide:
    """llama.cpp with the settings that make it fastest here."""

    def __init__(self, file: Path, *, threads: int, trial: Prompts, new_tokens: int) -> None:
        made, told = fastest(
            SETTINGS,
            lambda **setting: LlamaCpp(file, rows=len(trial), threads=threads, **setting),
            lambda llama: timed(llama.generate, trial, new_tokens)[0],
        )
        self._llama: LlamaCpp = made
        self.about = f"llama.cpp of llama-cpp-python {llama_cpp.__version__} ({told})"

    def run(self, prompts: Prompts, new_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds and answers."""
        return timed(self._llama.generate, prompts, new_tokens)


class LlamaCpp:
    """A model on one context, for up to ``rows`` rows at a time."""

    def __init__(self, file: Path, *, rows: int, threads: int, **options: Any) -> None:
        """``options`` are fields of ``llama_context_params``."""
        self._log = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(
            str(file).encode(), llama_cpp.llama_model_default_params()
        )
        assert model, f"llama.cpp cannot read {file}"
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = CELLS, rows
        params.n_batch, params.n_ubatch = BATCH_TOKENS, 512
        params.n_threads = params.n_threads_batch = threads
        for name, value in options.items():
            setattr(params, name, value)
        self._context = llama_cpp.llama_init_from_model(model, params)
        assert self._context, "llama.cpp cannot make a context"
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        # The batch's arrays, to be filled without a Python loop.
        shape = (BATCH_TOKENS,)
        self._tokens = np.ctypeslib.as_array(batch.token, shape)
        self._positions = np.ctypeslib.as_array(batch.pos, shape)
        self._wanted = np.ctypeslib.as_array(batch.logits, shape)
        self._rows = np.empty(BATCH_TOKENS, np.int32)
        np.ctypeslib.as_array(batch.n_seq_id, shape)[:] = 1
        for at in range(BATCH_TOKENS):
            batch.seq_id[at] = self._rows[at:].ctypes.data_as(ctypes.POINTER(ctypes.c_int32))

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """Greedy answers of exactly ``new_tokens`` tokens."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        last = self._prefill(prompts)
        answers, lengths = [last], np.array([len(prompt) for prompt in prompts])
        for step in range(new_tokens - 1):
            self._put(last, lengths + step, np.arange(len(prompts)), wanted=len(prompts))
            last = self._decode()
            answers.append(last)
        columns: list[list[int]] = np.array(answers).T.tolist()
        return columns

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> "np.ndarray[Any, Any]":
        """The first token of every row; whole prompts share a batch."""
        first = []
        for row, prompt in enumerate(prompts):
            if self._batch.n_tokens + len(prompt) > BATCH_TOKENS:
                first.append(self._decode())
            self._put(np.array(prompt), np.arange(len(prompt)), row, wanted=1)
        return np.concatenate([*first, self._decode()])

    def _put(self, tokens: Any, positions: Any, rows: Any, *, wanted: int) -> None:
        """Appends tokens to the batch; behind the last ``wanted`` of them logits are wanted."""
        start, end = self._batch.n_tokens, self._batch.n_tokens + len(tokens)
        self._tokens[start:end], self._positions[start:end] = tokens, positions
        self._rows[start:end] = rows
        self._wanted[start : end - wanted] = 0
        self._wanted[end - wanted : end] = 1
        self._batch.n_tokens = end

    def _decode(self) -> "np.ndarray[Any, Any]":
        """Computes the batch and empties it; the most probable token where one was wanted, in order."""
        wanted = int(self._wanted[: self._batch.n_tokens].sum())
        assert llama_cpp.llama_decode(self._context, self._batch) == 0, "llama.cpp failed"
        self._batch.n_tokens = 0
        logits = llama_cpp.llama_get_logits(self._context)
        tokens: np.ndarray[Any, Any] = np.ctypeslib.as_array(logits, (wanted, self._vocab)).argmax(
            -1
        )
        return tokens
