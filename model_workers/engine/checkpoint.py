"""Makes the engine of a model's settings.

On a CPU the weights are computed in float32, whatever they are stored in: docs/decisions/engine-numerics.md says why.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from transformers.utils.hub import cached_file

from model_workers.engine.batch import PagedModel
from model_workers.engine.forward import LoadedModel, load_model
from model_workers.engine.memory import CacheSize, cache_size, free_bytes
from model_workers.engine.paged_engine import PagedEngine
from model_workers.engine.protocol import RowSpec, Sampling
from model_workers.engine.sampling.grammars import find_grammars
from model_workers.engine.sampling.sampler import Sampler
from model_workers.engine.speculation.speculator import Speculator
from model_workers.model_folder import TOKENIZER, check_same_tokens
from sluice.settings import ModelSettings, SettingsError, resolve_model_path

log = logging.getLogger(__name__)


def load_engine(settings: ModelSettings, clock: Callable[[], float] | None = None) -> PagedEngine:
    """The engine of a model folder or hub id, warmed up.

    Args:
        clock: monotonic seconds; needed with a draft, which is used only while it is measured to pay.

    Raises:
        SettingsError: the model is not a decoder-only one of transformers, its context is smaller than asked for, the
            cache is too small, or the draft is of another kind.
    """
    loaded = _load(settings)
    draft = None if settings.draft is None else _load_draft(settings, settings.draft, loaded)
    size = _cache_size(settings, loaded, draft)
    sampler = Sampler(find_grammars(resolve_model_path(settings.path)))
    model = loaded.paged(size.num_blocks, size.block_tokens)
    engine = PagedEngine(
        model,
        sampler,
        slots=settings.slots,
        max_waiting=settings.max_waiting_rows,
        prefill_tokens=settings.prefill_tokens,
        prefix_cache=settings.prefix_cache,
        speculator=None if draft is None else _speculator(settings, draft, model, sampler, clock),
    )
    _warm_up(engine)
    log.info(
        "%s: %s on %s, context of %d tokens, cache of %d blocks of %d tokens (%.3g GB)",
        settings.name,
        loaded.dtype,
        loaded.device,
        loaded.context_tokens,
        size.num_blocks,
        size.block_tokens,
        size.bytes / 1e9,
    )
    return engine


def limit_threads(threads: int) -> None:
    """Sets the process's thread pools; once, before the first computation."""
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)


def _load(settings: ModelSettings) -> LoadedModel:
    try:
        return load_model(
            resolve_model_path(settings.path),
            device=settings.device,
            dtype=settings.dtype,
            context_tokens=settings.context_tokens,
            quantization=settings.quantization,
        )
    except SettingsError as error:
        raise SettingsError(f"models: {settings.name}: {error}") from error


def _load_draft(settings: ModelSettings, path: str, loaded: LoadedModel) -> LoadedModel:
    """The model that drafts, with a context no longer than that of the model it drafts for."""
    path = resolve_model_path(path)
    files = [str(cached_file(folder, TOKENIZER)) for folder in (loaded.path, path)]
    check_same_tokens(settings, Path(files[0]), Path(files[1]))
    try:
        draft = load_model(
            path,
            device=settings.device,
            dtype=settings.dtype,
            quantization=settings.quantization,
        )
    except SettingsError as error:
        raise SettingsError(f"models: {settings.name}: draft: {error}") from error
    return replace(draft, context_tokens=min(draft.context_tokens, loaded.context_tokens))


def _cache_size(
    settings: ModelSettings, loaded: LoadedModel, draft: LoadedModel | None
) -> CacheSize:
    """A draft has as many blocks beside those of the model."""
    models = [loaded] if draft is None else [loaded, draft]
    block_tokens = settings.block_tokens or max(model.block_tokens() for model in models)
    return cache_size(
        settings,
        context_tokens=loaded.context_tokens,
        block_tokens=block_tokens,
        block_bytes=sum(model.bytes_per_block(block_tokens) for model in models),
        free=free_bytes(loaded.device),
        on_cuda=loaded.device.type == "cuda",
    )


def _speculator(
    settings: ModelSettings,
    draft: LoadedModel,
    model: PagedModel,
    sampler: Sampler,
    clock: Callable[[], float] | None,
) -> Speculator:
    assert clock is not None, "whether a draft pays is a matter of time"
    return Speculator(
        draft.paged(model.num_blocks, model.block_tokens),
        sampler,
        vocab_size=model.vocab_size,
        draft_tokens=settings.draft_tokens,
        catch_up_tokens=settings.prefill_tokens,
        clock=clock,
    )


def _warm_up(engine: PagedEngine) -> None:
    """One prompt and two tokens, so that the first caller does not pay for first-time set-up."""
    engine.add(RowSpec("warm-up", "", 0, (0, 0), (), Sampling(max_tokens=2)), 0.0)
    while engine.has_rows():
        engine.step(0.0)
