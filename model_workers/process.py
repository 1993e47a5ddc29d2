"""Set-up of a worker's process: builds its engine."""

import ctypes
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from model_workers.engine.cacheless import EchoEngine
from model_workers.engine.protocol import Engine
from model_workers.model_folder import CONFIG, check_model, named
from model_workers.prepared import PreparedEngine
from sluice.interpreter import switch_threads_soon
from sluice.settings import ModelSettings, resolve_model_path

ECHO_CONTEXT_TOKENS: Final = 4096
"""Context length of the echo engine if the settings have none."""


def build_engine(settings: ModelSettings, wake: Callable[[], None]) -> Engine:
    """Build the engine that `settings` name. Call it once per process: it configures the process's threads.

    `wake` is called from any thread when the engine has work that did not come through `add`.

    Raises:
        SettingsError: The model cannot be served.
    """
    switch_threads_soon()
    if settings.engine == "echo":
        context = settings.context_tokens or ECHO_CONTEXT_TOKENS
        limits = (settings.slots, settings.max_waiting_rows, context)
        if not settings.echo_step_ms:
            return EchoEngine(*limits)
        return EchoEngine(*limits, partial(time.sleep, settings.echo_step_ms / 1000))
    check_model(settings)
    with named(settings.name, ValueError, OSError):
        engine = _load(settings, wake)
    return_free_memory()
    return engine


def return_free_memory() -> None:
    """Return freed heap memory to the system.

    Loading weights leaves much of the heap free, a quarter of a small model's worker, and glibc keeps it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc has it, musl does not
        trim(0)


def _load(settings: ModelSettings, wake: Callable[[], None]) -> Engine:
    # Imported here: an echo worker needs no torch, and a broken folder is reported at once.
    from model_workers.engine.checkpoint import limit_threads, load_engine

    limit_threads(settings.threads)
    if settings.engine == "classifier":
        from model_workers.engine.values import load_classifier

        return load_classifier(settings)
    if settings.engine in ("embedding", "reranker", "token_classifier"):
        from model_workers.engine.values import load_values

        return load_values(settings)
    if settings.engine == "generate":
        from model_workers.engine.generate.load import load_generate

        whole = load_generate(settings)
        return PreparedEngine(whole, whole.sampler, wake)
    if _may_have_encoder(settings):
        from model_workers.engine.families import load_encoder_decoder

        if (reading := load_encoder_decoder(settings)) is not None:
            return PreparedEngine(reading, reading.sampler, wake)
    ranks = None
    if settings.tensor_parallel > 1:
        from model_workers.ranks import RankProcesses

        ranks = RankProcesses(settings, lambda: os._exit(1))
    engine = load_engine(settings, time.monotonic, ranks)
    return PreparedEngine(engine, engine.sampler, wake)


def _may_have_encoder(settings: ModelSettings) -> bool:
    """Return whether the model may have an encoder, by its config.json: transformers would take seconds to say so."""
    file = Path(resolve_model_path(settings.path), CONFIG)
    return not file.is_file() or bool(json.loads(file.read_text()).get("is_encoder_decoder"))
