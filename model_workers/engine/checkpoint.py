"""Loads a model of transformers into an engine.

On a CPU the weights are computed in float32, whatever they are stored in: docs/decisions/engine-numerics.md says why.
"""

import logging
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from model_workers.engine.protocol import RowSpec, Sampling
from model_workers.engine.transformers_engine import TransformersEngine
from sluice.settings import ModelSettings, SettingsError, resolve_model_path

log = logging.getLogger(__name__)

LAYERS_WITH_KEYS: Final = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers whose state is keys and values, which is what a slot holds."""


def load_engine(settings: ModelSettings) -> TransformersEngine:
    """The engine of a model folder or hub id, warmed up.

    Raises:
        SettingsError: the model is not a decoder-only one of transformers, or its context is smaller than asked for.
    """
    path = resolve_model_path(settings.path)
    config = _config(path)
    context_tokens = _context_tokens(config, settings)
    model = _model(path, config, _device(settings.device), settings.dtype)
    engine = TransformersEngine(
        model,
        slots=settings.slots,
        max_waiting=settings.max_waiting_rows,
        context_tokens=context_tokens,
    )
    _warm_up(engine)
    log.info(
        "%s: %s on %s, context of %d tokens",
        settings.name,
        model.dtype,
        model.device,
        context_tokens,
    )
    return engine


def limit_threads(threads: int) -> None:
    """Sets the process's thread pools; once, before the first computation."""
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)


def _config(path: str) -> Any:
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: {str(error).splitlines()[0]}") from error
    if config.is_encoder_decoder:
        raise SettingsError(f"{path}: is an encoder-decoder model; name a decoder-only one")
    others = set(getattr(config, "layer_types", None) or ()) - LAYERS_WITH_KEYS
    if others:
        raise SettingsError(f"{path}: layers of kind {', '.join(sorted(others))} cannot be served")
    return config


def _context_tokens(config: Any, settings: ModelSettings) -> int:
    """Up to a sliding window's length it hides nothing, so that is where the context ends."""
    known = [getattr(config, name, None) for name in ("max_position_embeddings", "sliding_window")]
    limits = [int(limit) for limit in known if limit]
    if not limits and settings.context_tokens is None:
        raise SettingsError(f"models: {settings.name}: set context_tokens, the model names none")
    wanted = settings.context_tokens or min(limits)
    if limits and wanted > min(limits):
        raise SettingsError(
            f"models: {settings.name}: context_tokens is {wanted}, "
            f"the model allows at most {min(limits)}"
        )
    return wanted


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise SettingsError(f"device: {name!r} is not a torch device") from error


def _model(path: str, config: Any, device: torch.device, dtype: str) -> Any:
    on_cpu = device.type == "cpu"
    if dtype == "auto":
        dtype = "float32" if on_cpu else "bfloat16"
    model: Any = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=getattr(torch, dtype),
        # With a mask, two plain matrix products are 3 to 4 times faster than the fused kernel on a CPU.
        attn_implementation="eager" if on_cpu else "sdpa",
    )
    return model.to(device).eval()


def _warm_up(engine: TransformersEngine) -> None:
    """One prompt and two tokens, so that the first caller does not pay for first-time set-up."""
    engine.add(RowSpec("warm-up", "", 0, (0, 0), (), Sampling(max_tokens=2)), 0.0)
    while engine.load().running + engine.load().waiting:
        engine.step(0.0)
