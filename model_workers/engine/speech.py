"""Whisper: speech in, text out; the rest of its engine is that of every encoder-decoder.

Audio becomes log-mel features here, by transformers' own feature extractor. The encoder computes only a few sequences
at a time: each costs as much as the longest, and a step must not wait for many. The prompt holds the decoder's first
tokens (start, language, task), as the gateway has chosen them. If the language is to be detected, the answer begins
with its token.
"""

from collections import abc
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration
from typing_extensions import override

from model_workers.engine.encoder_decoder import EncoderDecoder
from model_workers.engine.protocol import SequenceSpec
from model_workers.engine.sequences import Sequence
from model_workers.engine.weights import read_whole
from sluice.errors import InvalidRequest
from sluice.internal.v1.task_pb2 import Audio
from sluice.settings import SettingsError

SAMPLES_A_SECOND: Final = 16_000
"""Sample rate of the audio."""
_LOUDEST: Final = 32_768.0
"""Scale of 16-bit samples."""


class SpeechModel(EncoderDecoder):
    """A speech model with its feature extractor; see `EncoderDecoder`."""

    begins_max: ClassVar[int] = 8
    trial: ClassVar[Audio | None] = Audio(pcm=bytes(2))

    def __init__(self, model: Any, extractor: Any) -> None:
        super().__init__(model)
        self._extractor = extractor
        generation = model.generation_config
        self.prefix = ()
        languages = getattr(generation, "lang_to_id", None) or {}
        self._languages: list[int] = sorted(languages.values())
        self._not_first = list(generation.begin_suppress_tokens or ())

    @override
    def check(self, sequence: SequenceSpec) -> None:
        if sequence.audio is None:
            raise InvalidRequest("this model takes audio, and no text alone")
        if len(sequence.audio.pcm) > 2 * self._extractor.n_samples:
            raise InvalidRequest(f"the audio is longer than {self._extractor.chunk_length} s")
        if sequence.audio.opening_token_ids and not self._languages:
            raise InvalidRequest(
                "generation_config.json has no lang_to_id: no language can be found"
            )

    def restrict(self, sequences: abc.Sequence[Sequence], logits: Tensor) -> None:
        """Force the fixed opening of answers; restrict what follows it as `EncoderDecoder.restrict` does."""
        chosen = {
            place: self._opening(sequence, logits[place])
            for place, sequence in enumerate(sequences)
            if sequence.answered < _opening_length(sequence)
        }
        super().restrict(sequences, logits)
        for place, sequence in enumerate(sequences):
            if place in chosen:
                logits[place] = -torch.inf
                logits[place, chosen[place]] = 0.0
            elif sequence.answered == _opening_length(sequence):
                logits[place, self._not_first] = -torch.inf

    def _opening(self, sequence: Sequence, logits: Tensor) -> int:
        """Return the next token of the answer's fixed opening."""
        assert sequence.spec.audio is not None
        if sequence.answered:
            return sequence.spec.audio.opening_token_ids[sequence.answered - 1]
        languages = torch.tensor(self._languages, device=logits.device)
        return self._languages[int(logits[languages].argmax())]

    def _states(self, sequences: abc.Sequence[Sequence]) -> abc.Sequence[Tensor]:
        features = self._features(
            [sequence.spec.audio.pcm for sequence in sequences if sequence.spec.audio]
        )
        features = features.to(self._model.device, self._model.dtype)
        states: Tensor = self._model.get_encoder()(features).last_hidden_state
        return states.float().unbind()

    def _decoder_tokens(self, sequence: Sequence) -> list[int]:
        return sequence.tokens

    def _features(self, samples: abc.Sequence[bytes]) -> Tensor:
        waves = [np.frombuffer(pcm, "<i2").astype(np.float32) / _LOUDEST for pcm in samples]
        inputs = self._extractor(waves, sampling_rate=SAMPLES_A_SECOND, return_tensors="pt")
        features: Tensor = inputs.input_features
        return features


def _opening_length(sequence: Sequence) -> int:
    """Return the number of answer tokens that are no text: the detected language and its fixed followers."""
    assert sequence.spec.audio is not None
    followers = sequence.spec.audio.opening_token_ids
    return 1 + len(followers) if followers else 0


def load_speech_model(path: str, dtype: torch.dtype, device: torch.device) -> SpeechModel:
    """Load the model of a folder or hub id.

    Raises:
        SettingsError: Its features are of another kind, or its weights are not complete.
        ValueError, OSError: It cannot be read.
    """
    model = read_whole(WhisperForConditionalGeneration, path, dtype=dtype)
    try:
        extractor: Any = WhisperFeatureExtractor.from_pretrained(path)
    except OSError:
        make: Any = WhisperFeatureExtractor
        extractor = make(feature_size=model.config.num_mel_bins)
    config = model.config
    expected = (config.num_mel_bins, 2 * config.max_source_positions, SAMPLES_A_SECOND)
    actual = (extractor.feature_size, extractor.nb_max_frames, extractor.sampling_rate)
    if expected != actual:
        raise SettingsError(
            "preprocessor_config.json: (feature_size, frames, sampling_rate) are "
            f"{actual}, the model takes {expected}"
        )
    return SpeechModel(model.to(device).eval(), extractor)
