"""Makes the engine of a model's settings.

On a CPU the weights are computed in float32, whatever they are stored in: docs/decisions/engine-numerics.md says why.
"""

import logging

import torch

from model_workers.engine.forward import LoadedModel, load_model
from model_workers.engine.memory import cache_blocks, free_bytes
from model_workers.engine.paged_engine import PagedEngine
from model_workers.engine.protocol import RowSpec, Sampling
from model_workers.engine.sampling.grammars import find_grammars
from model_workers.engine.sampling.sampler import Sampler
from sluice.settings import ModelSettings, SettingsError, resolve_model_path

log = logging.getLogger(__name__)


def load_engine(settings: ModelSettings) -> PagedEngine:
    """The engine of a model folder or hub id, warmed up.

    Raises:
        SettingsError: the model is not a decoder-only one of transformers, its context is smaller than asked for, or
            the cache is too small.
    """
    loaded = _load(settings)
    blocks = cache_blocks(
        settings,
        context_tokens=loaded.context_tokens,
        block_bytes=loaded.bytes_per_block(settings.block_tokens),
        free=free_bytes(loaded.device),
        on_cuda=loaded.device.type == "cuda",
    )
    engine = PagedEngine(
        loaded.paged(blocks, settings.block_tokens),
        Sampler(find_grammars(resolve_model_path(settings.path))),
        slots=settings.slots,
        max_waiting=settings.max_waiting_rows,
        prefill_tokens=settings.prefill_tokens,
        prefix_cache=settings.prefix_cache,
    )
    _warm_up(engine)
    _tell(settings, loaded, blocks)
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
        )
    except SettingsError as error:
        raise SettingsError(f"models: {settings.name}: {error}") from error


def _warm_up(engine: PagedEngine) -> None:
    """One prompt and two tokens, so that the first caller does not pay for first-time set-up."""
    engine.add(RowSpec("warm-up", "", 0, (0, 0), (), Sampling(max_tokens=2)), 0.0)
    while engine.has_rows():
        engine.step(0.0)


def _tell(settings: ModelSettings, loaded: LoadedModel, blocks: int) -> None:
    size_gb = blocks * loaded.bytes_per_block(settings.block_tokens) / 1e9
    log.info(
        "%s: %s on %s, context of %d tokens, cache of %d blocks of %d tokens (%.3g GB)",
        settings.name,
        loaded.dtype,
        loaded.device,
        loaded.context_tokens,
        blocks,
        settings.block_tokens,
        size_gb,
    )
