"""Loads a model of transformers for `engine: generate`, and finds out how it can be batched."""

import logging
from collections.abc import Sequence
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    GenerationMixin,
)

from model_workers.engine.devices import TOLERANCES, cache_bytes, find_device, memory_limit
from model_workers.engine.forward.load import find_context
from model_workers.engine.generate.engine import GenerateEngine
from model_workers.engine.generate.model import Batching, GenerateModel
from model_workers.engine.protocol import warm_up
from model_workers.engine.sampling.sampler import Sampler
from model_workers.engine.sequences import SequenceLimits
from model_workers.engine.weights import find_constraints, read_whole
from model_workers.model_folder import first_line, weight_bytes
from sluice.settings import ModelSettings, SettingsError, resolve_model_path
from sluice.settings.models import SideLimits, side_limits

logger = logging.getLogger(__name__)

TRIAL: Final = (5, 11)
"""Lengths of the two prompts that show whether padding changes logits, in tokens."""
TRIAL_TOKENS: Final = 4
"""Number of tokens that the trial compares."""
_SEQ2SEQ: Final = (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)
_DECODERS: Final = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)


def load_generate(settings: ModelSettings) -> GenerateEngine:
    """Load the engine of a model folder or hub id, warmed up.

    Raises:
        SettingsError: The model has no `generate()`, needs more than a text, or does not fit.
        ValueError, OSError: It cannot be read.
    """
    path = resolve_model_path(settings.path)
    config = AutoConfig.from_pretrained(path)
    make = _class_of(path, config)
    device = find_device(settings.device)
    # Only float32 gives a sequence that another worker continues the same tokens.
    dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
    context, sides = _limits(path, config, settings)
    _check_memory(settings, path, config, (device, dtype), context)
    loaded = read_whole(make, path, dtype=dtype).to(device).eval()
    model = GenerateModel(loaded)
    model.batching = _find_batching(path, loaded, model, TOLERANCES[dtype])
    sampler = Sampler(find_constraints(path))
    engine = GenerateEngine(model, sampler, SequenceLimits.of(settings, context), sides)
    warm_up(engine, max_tokens=2)
    logger.info(
        "loaded %s: %s in %s on %s, context of %d tokens, %s",
        settings.name,
        type(loaded).__name__,
        dtype,
        device,
        context,
        model.batching,
    )
    return engine


def _limits(path: str, config: Any, settings: ModelSettings) -> tuple[int, SideLimits | None]:
    if not config.is_encoder_decoder:
        return find_context(path, config.to_dict(), settings.context_tokens), None
    sides = side_limits(config.to_dict(), settings.context_tokens)
    if sides is None:
        raise SettingsError("context_tokens: the model names none; set it")
    return sides.context, sides


def _class_of(path: str, config: Any) -> Any:
    """Return the class of transformers that a checkpoint was saved from, else the one for its kind.

    Raises:
        SettingsError: It has no `generate()` that reads a text.
    """
    name = (config.architectures or [""])[0]
    model_class: Any = getattr(transformers, name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, GenerationMixin)):
        mappings = _SEQ2SEQ if config.is_encoder_decoder else _DECODERS
        model_class = next(
            (mapping[type(config)] for mapping in mappings if type(config) in mapping), None
        )
    if model_class is None:
        raise SettingsError(
            f"{path}: {name or config.model_type} has no generate() in transformers; "
            "take a model that answers prompts, or another engine"
        )
    if model_class.main_input_name != "input_ids":
        raise SettingsError(
            f"{path}: the generate() of {model_class.__name__} takes {model_class.main_input_name}, "
            "and this engine gives it texts alone; take a model that answers texts, or another engine"
        )
    return model_class


def _check_memory(
    settings: ModelSettings,
    path: str,
    config: Any,
    where: tuple[torch.device, torch.dtype],
    context: int,
) -> None:
    """Raise an error for a model whose weights and cache do not fit.

    Raises:
        SettingsError: By how much, and what to change.
    """
    device, dtype = where
    weights = weight_bytes(path, dtype.itemsize)
    cache = settings.slots * context * token_bytes(config, dtype.itemsize)
    room = settings.cache_gb and settings.cache_gb * 1e9
    if room is None:
        share = settings.memory_share
        free = (
            memory_limit(device, share) if device.type == "cuda" else 2 * cache_bytes(device, share)
        )
        room = free - weights
    if cache > room:
        raise SettingsError(
            f"slots: {settings.slots} sequences of {context} tokens need a cache of {cache / 1e9:.3g} GB, and "
            f"{max(0.0, room) / 1e9:.3g} GB are there beside weights of {weights / 1e9:.3g} GB; "
            "lower slots or context_tokens, or raise cache_gb or memory_share"
        )


def token_bytes(config: Any, itemsize: int) -> int:
    """Return the memory of one token's keys and values in all layers; 0 for a model without."""
    text = config.get_text_config(decoder=True)
    layers = getattr(text, "num_hidden_layers", 0)
    heads = getattr(text, "num_attention_heads", 0)
    if not layers or not heads:
        return 0
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    heads = getattr(text, "num_key_value_heads", None) or heads
    return int(2 * layers * heads * size * itemsize)


def _find_batching(path: str, loaded: Any, model: GenerateModel, tolerance: float) -> Batching:
    """Find out in which batches a prompt gets the same logits as alone.

    Raises:
        SettingsError: `generate()` does not run on a text alone.
    """
    short, long = (model.trial_prompt(length) for length in TRIAL)
    try:
        alone = _logits(model, [short])
        for batching, other in (
            (Batching.PADDED, long),
            (Batching.EQUAL_LENGTHS, long[-len(short) :]),
        ):
            if _agrees(alone, _logits(model, [short, other]), tolerance):
                return batching
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise SettingsError(
            f"{path}: the generate() of {type(loaded).__name__} does not run on input_ids and attention_mask "
            f"alone ({type(error).__name__}: {first_line(error)}); take a model that answers texts"
        ) from error
    return Batching.ALONE


def _agrees(alone: Sequence[Tensor], beside: Sequence[Tensor], tolerance: float) -> bool:
    """Return whether logits are equal up to rounding, until a tie."""
    for alone_logits, beside_logits in zip(alone, beside, strict=True):
        size = alone_logits.max() - alone_logits.min()
        if not (alone_logits - beside_logits).abs().max() <= tolerance * size:
            return False
        if alone_logits.argmax() != beside_logits.argmax():
            break  # what follows differs for that reason
    return True


def _logits(model: GenerateModel, sequences: Sequence[Sequence[int]]) -> Sequence[Tensor]:
    """Return the logits after the first of `sequences`, and after its first tokens."""
    result = model.generate(
        sequences, 0, TRIAL_TOKENS, output_logits=True, return_dict_in_generate=True
    )
    return [step[0].float() for step in result.logits]
