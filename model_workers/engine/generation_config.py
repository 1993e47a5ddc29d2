"""The parts of a model's generation_config.json that apply; the rest (sampling, beams, penalties) is in the request."""

from dataclasses import replace
from typing import Any

from model_workers.engine.protocol import SequenceSpec
from sluice.errors import PromptTooLong
from sluice.settings import SettingsError
from sluice.settings.models import SideLimits


def answer_prefix(model: Any) -> tuple[int, ...]:
    """Return the tokens that begin every answer of an encoder-decoder and are not part of it.

    Raises:
        SettingsError: The model names none.
    """
    generation = model.generation_config
    first, forced = generation.decoder_start_token_id, generation.forced_bos_token_id
    if first is None:
        first = getattr(model.config, "decoder_start_token_id", None)
    if first is None:
        raise SettingsError("config.json: decoder_start_token_id: is missing; set it")
    return (first,) if forced is None else (first, forced)


def ruled_out(generation: Any) -> list[int]:
    """Return the tokens that are never drawn, such as padding."""
    single = [words[0] for words in generation.bad_words_ids or () if len(words) == 1]
    return sorted({*single, *(generation.suppress_tokens or ())})


def pad_token(generation: Any) -> int:
    """Return the token that pads shorter sequences."""
    for value in (generation.pad_token_id, generation.eos_token_id):
        if value is not None:
            return int(value[0] if isinstance(value, list) else value)
    return 0


def limit_sides(sequence: SequenceSpec, sides: SideLimits, prefix_tokens: int) -> SequenceSpec:
    """Limit the answer of an encoder-decoder, which begins with `prefix_tokens` of its own.

    Raises:
        PromptTooLong: The encoder does not read the prompt.
    """
    if len(sequence.prompt) > sides.prompt:
        raise PromptTooLong(
            f"the prompt has {len(sequence.prompt)} tokens; the encoder reads {sides.prompt}"
        )
    most = min(sequence.sampling.max_tokens, sides.answer - prefix_tokens)
    return replace(sequence, sampling=replace(sequence.sampling, max_tokens=most))
