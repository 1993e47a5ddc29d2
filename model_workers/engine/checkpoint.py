"""Loads the engine of a model: weights, KV cache, constraints, draft model.

On a CPU the weights are computed in float32 however they are stored; docs/internals/decisions/engine-numerics.md has
the reasons.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from model_workers.engine.devices import cache_bytes, check_weights_fit, find_device, find_dtype
from model_workers.engine.forward import LoadedModel, load_model
from model_workers.engine.forward.tensor_parallel import Followers, LeadRank
from model_workers.engine.paged_engine import PagedEngine
from model_workers.engine.protocol import warm_up
from model_workers.engine.sampling.sampler import Sampler
from model_workers.engine.speculation import Speculator
from model_workers.engine.weights import find_constraints, tokenizer_of
from model_workers.model_folder import TOKENIZER, check_same_tokens, first_line, weight_bytes
from sluice.settings import ModelSettings, SettingsError, resolve_model_path

logger = logging.getLogger(__name__)


def load_engine(
    settings: ModelSettings,
    clock: Callable[[], float] | None = None,
    followers: Followers | None = None,
) -> PagedEngine:
    """Load the engine of a model folder or hub id, warmed up.

    - `clock`: Returns monotonic seconds; needed with a draft model, which is used only while it is measured to be
      faster.
    - `followers`: The other ranks of a model with `tensor_parallel`.

    Raises:
        SettingsError: The model is not a decoder-only one of transformers, its context is shorter than set, the device
            lacks memory for weights or cache, or the draft model is of another kind.
        ValueError, OSError: It cannot be read.
    """
    loaded = load_model_of(settings)
    draft = None if settings.draft is None else _load_draft(settings, settings.draft, loaded)
    num_blocks, block_tokens, size = _cache_size(settings, loaded, draft)
    sampler = Sampler(find_constraints(resolve_model_path(settings.path)))
    try:
        # All sequences may decode in one step, with their drafted tokens.
        step_tokens = settings.slots * (1 + (settings.draft_tokens if draft else 0))
        sizes = num_blocks, block_tokens, step_tokens
        if followers is not None:
            followers.send("paged", *sizes)
        model = loaded.paged(*sizes)
        if followers is not None:
            model = LeadRank(model, followers)
        speculator = None
        if draft is not None:
            assert clock is not None, "drafting is measured by the clock"
            speculator = Speculator(
                draft.paged(*sizes),
                sampler,
                vocab_size=model.vocab_size,
                draft_tokens=settings.draft_tokens,
                catch_up_tokens=settings.prefill_tokens,
                clock=clock,
            )
    except torch.OutOfMemoryError as error:
        raise SettingsError(
            f"a cache of {size / 1e9:.3g} GB does not fit on {loaded.device} beside "
            f"the weights ({first_line(error)}): lower cache_gb or memory_share, or slots or context_tokens"
        ) from error
    engine = PagedEngine(
        model,
        sampler,
        slots=settings.slots,
        max_waiting=settings.max_waiting_rows,
        prefill_tokens=settings.prefill_tokens,
        prefix_cache=settings.prefix_cache,
        speculator=speculator,
        device=loaded.device,
        # On a CPU the host is the device; ranks get their tokens from the host.
        overlap=loaded.device.type == "cuda" and followers is None,
    )
    warm_up(engine, max_tokens=2)
    logger.info(
        "%s: %s on %s, context of %d tokens, cache of %d blocks of %d tokens (%.3g GB)",
        settings.name,
        loaded.dtype,
        loaded.device,
        loaded.context_tokens,
        num_blocks,
        block_tokens,
        size / 1e9,
    )
    return engine


def limit_threads(threads: int) -> None:
    """Set the threads of torch's operators, and a single inter-op thread: engines run one operator at a time.

    Call it once, before the first computation: torch refuses another size of the inter-op pool later.
    """
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)


def load_model_of(settings: ModelSettings, device_name: str | None = None) -> LoadedModel:
    """Load the weights, or a rank's part of them on its own device.

    Raises:
        SettingsError, ValueError, OSError: As `load_engine`.
    """
    path = resolve_model_path(settings.path)
    first = f"cuda:{settings.devices[0]}" if settings.devices else settings.device
    device = find_device(device_name or first)
    weights = weight_bytes(path, find_dtype(settings.dtype, device).itemsize)
    check_weights_fit(device, settings.memory_share, weights // settings.tensor_parallel)
    try:
        return load_model(
            path,
            device=str(device),
            dtype=settings.dtype,
            context_tokens=settings.context_tokens,
            quantization=settings.quantization,
            ranks=settings.tensor_parallel,
        )
    except torch.OutOfMemoryError as error:
        raise SettingsError(
            f"its weights do not fit on {device} ({first_line(error)}): "
            "serve fewer models or replicas on this device, or take a smaller model"
        ) from error


def _load_draft(settings: ModelSettings, path: str, loaded: LoadedModel) -> LoadedModel:
    """Load the draft model, with a context no longer than that of the model it drafts for."""
    path = resolve_model_path(path)
    files = [tokenizer_of(folder) or Path(folder, TOKENIZER) for folder in (loaded.path, path)]
    check_same_tokens(settings, *files)
    try:
        draft = load_model(
            path, device=settings.device, dtype=settings.dtype, quantization=settings.quantization
        )
    except SettingsError as error:
        raise SettingsError(f"draft: {error}") from error
    return replace(draft, context_tokens=min(draft.context_tokens, loaded.context_tokens))


def _cache_size(
    settings: ModelSettings, loaded: LoadedModel, draft: LoadedModel | None
) -> tuple[int, int, int]:
    """Return the number of blocks, their tokens, and the bytes of all, by `cache_gb` or a share of the free memory.

    They are no more than all slots could fill. A draft model has as many blocks of its own.

    Raises:
        SettingsError: Not even one sequence of the context length fits.
    """
    models = [loaded] if draft is None else [loaded, draft]
    block_tokens = max(model.block_tokens() for model in models)
    block_bytes = sum(model.bytes_per_block(block_tokens) for model in models)
    sequence = math.ceil(loaded.context_tokens / block_tokens)
    size = settings.cache_gb and settings.cache_gb * 1e9
    size = size or cache_bytes(loaded.device, settings.memory_share)
    blocks = int(size // block_bytes)
    if blocks < sequence:
        raise SettingsError(
            f"a sequence of {loaded.context_tokens} tokens needs a cache of "
            f"{sequence * block_bytes / 1e9:.3g} GB, and {size / 1e9:.3g} GB are there: "
            "raise cache_gb or memory_share, or lower context_tokens"
        )
    blocks = min(blocks, sequence * settings.slots)
    return blocks, block_tokens, blocks * block_bytes
