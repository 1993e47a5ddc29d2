"""The encoder-decoders of transformers that are served, and how their engines are loaded."""

import logging
from typing import Final

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from model_workers.engine.devices import find_device, find_dtype
from model_workers.engine.encoder_decoder import EncoderDecoder, EncoderDecoderEngine
from model_workers.engine.protocol import warm_up
from model_workers.engine.sampling.sampler import Sampler
from model_workers.engine.sequences import SequenceLimits
from model_workers.engine.speech import load_speech_model
from model_workers.engine.weights import find_constraints, read_whole
from sluice.settings import ModelSettings, SettingsError, resolve_model_path
from sluice.settings.models import GENERATE, side_limits

FAMILIES: Final = ("t5", "mt5", "umt5", "bart", "marian", "pegasus", "whisper")
"""Supported values of `model_type`."""

logger = logging.getLogger(__name__)


def load_encoder_decoder(settings: ModelSettings) -> EncoderDecoderEngine | None:
    """Load the engine of a folder or hub id, warmed up; return None if it is no encoder-decoder or cannot be read.

    Raises:
        SettingsError: Its family is not served, or a setting does not fit it.
        ValueError, OSError: Its weights cannot be read.
    """
    try:
        path = resolve_model_path(settings.path)
        config = AutoConfig.from_pretrained(path)
    except (ValueError, OSError, SettingsError):
        return None
    if not config.is_encoder_decoder:
        return None
    if config.model_type not in FAMILIES:
        raise SettingsError(
            f"{config.model_type} is not served, only {', '.join(FAMILIES)}; {GENERATE}"
        )
    if settings.draft or settings.tensor_parallel > 1:
        raise SettingsError("draft and tensor_parallel are for decoder-only models")
    if settings.quantization != "none":
        raise SettingsError("quantization is for decoder-only models")
    sides = side_limits(config.to_dict(), settings.context_tokens)
    if sides is None:
        raise SettingsError("set context_tokens, the model names none")
    device = find_device(settings.device)
    dtype = find_dtype(settings.dtype, device)
    model = _load_model(path, config.model_type, dtype, device)
    limits = SequenceLimits.of(settings, sides.context)
    engine = EncoderDecoderEngine(model, Sampler(find_constraints(path)), limits, sides)
    warm_up(engine, max_tokens=2, audio=model.trial)
    logger.info(
        "%s: %s on %s, %d tokens to read, %d to answer",
        settings.name, dtype, device, sides.prompt, sides.answer,
    )  # fmt: skip
    return engine


def _load_model(path: str, kind: str, dtype: torch.dtype, device: torch.device) -> EncoderDecoder:
    if kind == "whisper":
        return load_speech_model(path, dtype, device)
    loaded = read_whole(AutoModelForSeq2SeqLM, path, dtype=dtype)
    return EncoderDecoder(loaded.to(device).eval())
