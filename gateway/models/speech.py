"""Prepare speech for a model: read WAV files, cut long audio into chunks, join their texts, build the decoder's prompt.

WAV files must have 16 kHz, one channel and 16 bits; nothing is resampled. The standard library's `wave` cannot read the
extensible format before Python 3.12, nor files that a program wrote to a pipe, whose header lacks the length.

As in transformers' pipeline, long audio is cut into overlapping chunks. A chunk is as long as the model takes; a sixth
of it on each side belongs to its neighbour as well. The texts of neighbours are joined where most of their tokens agree
when one is slid along the other: half of the overlap is taken from each.

The decoder's prompt follows the model's folder and transformers' `generate`.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any, Final

from tokenizers import Tokenizer

from sluice.settings.models import chunk_s

SAMPLES_A_SECOND: Final = 16_000
SAMPLE_BYTES: Final = 2
BYTES_A_SECOND: Final = SAMPLES_A_SECOND * SAMPLE_BYTES
HEAD_BYTES: Final = 64 * 1024
"""Most bytes of a file beside its samples."""
CHUNKS_MAX: Final = 256
"""Most RIFF chunks before the samples: a file of empty chunks would take seconds to read."""
CONVERT: Final = "convert it: ffmpeg -i FILE -ar 16000 -ac 1 -c:a pcm_s16le out.wav"
_PCM: Final = 1
_EXTENSIBLE: Final = 0xFFFE
SHARED: Final = 6
"""Divisor of the length of a chunk: the part on each side that belongs to its neighbour as well."""
_LONGER: Final = 10_000.0
"""Divisor of the bonus that makes a long overlap win over a short one that agrees equally well."""
_PREVIOUS: Final = "<|startofprev|>"


@dataclass(frozen=True)
class SpeechTokens:
    """Control tokens of a model that takes audio.

    Attributes:
        start: Token that begins a text.
        languages: Tokens of languages by code, such as "en"; empty for a model of one language.
        tasks: Tokens of "transcribe" and "translate"; empty for a model that only transcribes.
        forced: Tokens after the start, for a model without languages.
        no_timestamps: Token that ends the decoder's prompt; may be None.
        previous: Token that begins the preceding text; None if the model takes none.
        previous_max: Most tokens of the preceding text.
        chunk_s: Length of audio that the model takes, in seconds.
        control: Tokens without text: those added to the vocabulary, and timestamps.
    """

    start: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    forced: tuple[int, ...]
    no_timestamps: int | None
    previous: int | None
    previous_max: int
    chunk_s: float
    control: frozenset[int]

    def begin(
        self, language: str, *, translate: bool, before: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Return the decoder's prompt, and the tokens to force after the language if the model has to detect it.

        Args:
            language: Code of the language; empty if unknown.
            translate: Whether to translate.
            before: Tokens of the preceding text, of which the last ones are used.
        """
        prompt = [self.previous, *before[-self.previous_max :]] if before and self.previous else []
        prompt.append(self.start)
        last = [] if self.no_timestamps is None else [self.no_timestamps]
        if not self.languages:
            forced = [token for token in self.forced if token not in last]
            return [*prompt, *forced, *last], []
        task = self.tasks.get("translate" if translate else "transcribe")
        rest = [*([] if task is None else [task]), *last]
        if language:
            return [*prompt, self.languages[language], *rest], []
        return prompt, rest

    def language_of(self, token_ids: Sequence[int]) -> str:
        """Return the language whose token begins an answer; empty if none does."""
        names = {token: name for name, token in self.languages.items()}
        return names.get(token_ids[0], "") if token_ids else ""


def speech_tokens(
    config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Tokenizer
) -> SpeechTokens:
    """Return the control tokens by a folder's config.json, generation_config.json and tokenizer."""
    languages = generation.get("lang_to_id") or {}
    no_timestamps = generation.get("no_timestamps_token_id")
    size = int(config.get("vocab_size") or 0)
    # Timestamps are all ids after this one; not every tokenizer lists them.
    times = range(1 + (no_timestamps or size), size)
    forced = generation.get("forced_decoder_ids") or config.get("forced_decoder_ids") or ()
    return SpeechTokens(
        start=generation.get("decoder_start_token_id", config.get("decoder_start_token_id", 50257)),
        languages={name.strip("<|>"): token for name, token in languages.items()},
        tasks=generation.get("task_to_id") or {},
        forced=tuple(token for _, token in forced if token is not None),
        no_timestamps=no_timestamps,
        previous=generation.get("prev_sot_token_id") or tokenizer.token_to_id(_PREVIOUS),
        previous_max=int(config.get("max_target_positions") or 448) // 2 - 1,
        chunk_s=chunk_s(config),
        control=frozenset((*tokenizer.get_added_tokens_decoder(), *times)),
    )


class BadAudio(ValueError):
    """Unsupported audio; the message says what to do."""


def pcm_of_wav(data: bytes) -> bytes:
    """Return the samples of a WAV file.

    Raises:
        BadAudio: The file is not WAV, or has another rate, width or number of channels.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise BadAudio(f"is not a WAV file; {CONVERT}")
    form, offset = b"", 12
    for _ in range(CHUNKS_MAX):
        if offset + 8 > len(data):
            break
        name, size = struct.unpack_from("<4sI", data, offset)
        body = offset + 8
        if name == b"fmt ":
            form = data[body : body + size]
        elif name == b"data":
            _check_form(form)
            # An unknown length is written as 0 or as the maximum: then all that follows are samples.
            end = body + size if size else len(data)
            return data[body : min(end, len(data))]
        offset = body + size + size % 2  # chunks are padded to an even length
    else:  # no samples within the bound
        raise BadAudio(
            f"is a WAV file with more than {CHUNKS_MAX} chunks before its samples; {CONVERT}"
        )
    raise BadAudio(f"is a WAV file without samples; {CONVERT}")


def _check_form(form: bytes) -> None:
    if len(form) < 16:
        raise BadAudio(f"is a WAV file with a truncated format chunk; {CONVERT}")
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", form)
    if kind == _EXTENSIBLE and len(form) >= 26:
        kind = struct.unpack_from("<H", form, 24)[0]
    if (kind, channels, rate, bits) != (_PCM, 1, SAMPLES_A_SECOND, 8 * SAMPLE_BYTES):
        coded = "" if kind == _PCM else f" of encoding {kind}"
        raise BadAudio(
            f"has {rate} Hz, {channels} channel{'' if channels == 1 else 's'}, {bits} bits{coded}; "
            f"must have {SAMPLES_A_SECOND} Hz, 1 channel, 16 bits of PCM; {CONVERT}"
        )


def chunks_of(pcm: bytes, chunk_s: float) -> Iterator[bytes]:
    """Yield the chunks of the samples `pcm` in order, at least one; only the last may be shorter than `chunk_s`."""
    size = int(chunk_s * BYTES_A_SECOND) // SAMPLE_BYTES * SAMPLE_BYTES
    step = size - 2 * (size // SAMPLE_BYTES // SHARED) * SAMPLE_BYTES
    for start in range(0, max(1, len(pcm)), step):
        yield pcm[start : start + size]
        if start + size >= len(pcm):
            return


def overlap(earlier: Sequence[int], right: Sequence[int]) -> tuple[int, int]:
    """Return (a, b) such that `earlier[:a] + right[b:]` is the joined text.

    Without two tokens that agree, it is all of both.
    """
    best_score, best = 0.0, (len(earlier), 0)
    for shift in range(1, len(earlier) + len(right)):
        left_from, right_from = max(0, len(earlier) - shift), max(0, shift - len(earlier))
        left_part, right_part = earlier[left_from:], right[right_from:shift]
        agreed = sum(map(eq, left_part, right_part))
        score = agreed / shift + shift / _LONGER
        if agreed > 1 and score > best_score:
            half = min(len(left_part), len(right_part)) // 2
            best_score, best = score, (left_from + half, right_from + half)
    return best


class JoinedTexts:
    """The joined tokens of chunks, which are added in order."""

    def __init__(self) -> None:
        self._left: list[int] = []

    def add(self, token_ids: Sequence[int]) -> list[int]:
        """Add the tokens of the next chunk; return the tokens of the text that are final now."""
        end, start = overlap(self._left, token_ids)
        final, self._left = self._left[:end], list(token_ids[start:])
        return final

    def end(self) -> list[int]:
        """Return the remaining tokens, when there are no more chunks."""
        rest, self._left = self._left, []
        return rest
