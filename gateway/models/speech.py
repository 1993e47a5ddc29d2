"""Speech: WAV files, chunks of long audio and the tokens of their texts joined, and what a model's decoder begins with.

WAV files (RIFF) have 16 kHz, one channel, 16 bits. Others are refused with what to do; nothing is resampled. The
standard library's `wave` refuses the extensible format before Python 3.12, and files whose length was not known when
their head was written, as programs write them to a pipe.

Long audio is cut into chunks that overlap, as transformers' pipeline does it. A chunk is as long as the model hears at
once; a sixth of it on each side is heard by its neighbour too. What two neighbours say in the overlap is found by
sliding one's tokens along the other's: where most of them agree, half of the overlap is taken from each.

What the decoder of a Whisper model begins with is as its folder says and transformers' `generate` has it.
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
"""What a file may have beside its samples."""
CHUNKS_MAX: Final = 256
"""Before the samples. A file of empty chunks would take seconds to read."""
CONVERT: Final = "convert it: ffmpeg -i FILE -ar 16000 -ac 1 -c:a pcm_s16le out.wav"
_PCM: Final = 1
_EXTENSIBLE: Final = 0xFFFE
SHARED: Final = 6
"""The part of a chunk, 1 in so many, that its neighbour hears too, on each side."""
_LONGER: Final = 10_000.0
"""What prefers a long overlap to a short one that agrees as well."""
_PREVIOUS: Final = "<|startofprev|>"


@dataclass(frozen=True)
class SpeechTokens:
    """The control tokens of a model that takes audio.

    Attributes:
        start: begins the text.
        languages: by name, such as "en"; empty: the model knows one language alone.
        tasks: "transcribe" and "translate"; empty: it only transcribes.
        forced: what follows the start of a model without languages.
        no_timestamps: ends what the decoder begins with; None: nothing does.
        previous: begins the text that comes before; None: the model takes none.
        previous_max: most tokens of that text.
        chunk_s: how much the model hears at once, seconds.
        control: no text: the tokens that were added to the model's vocabulary, and those of times.
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
        """The decoder's prompt, and what follows the language in the answer where the model is to find it.

        Args:
            language: empty: not known.
            before: the tokens of the text that comes before; of many the last ones are taken.
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
        """The language that an answer begins with; empty: none."""
        names = {token: name for name, token in self.languages.items()}
        return names.get(token_ids[0], "") if token_ids else ""


def speech_tokens(
    config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Tokenizer
) -> SpeechTokens:
    """Those of a folder's config.json, generation_config.json and tokenizer."""
    languages = generation.get("lang_to_id") or {}
    no_timestamps = generation.get("no_timestamps_token_id")
    size = int(config.get("vocab_size") or 0)
    # Those of times are all that lie behind; not every tokenizer lists them.
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
    """The bytes are no audio that is taken; the message says what is."""


def pcm_of_wav(data: bytes) -> bytes:
    """The samples of a WAV file.

    Raises:
        BadAudio: it is none, or of another rate, width or number of channels.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise BadAudio(f"is no WAV file; {CONVERT}")
    form, place = b"", 12
    for _ in range(CHUNKS_MAX):
        if place + 8 > len(data):
            break
        name, size = struct.unpack_from("<4sI", data, place)
        body = place + 8
        if name == b"fmt ":
            form = data[body : body + size]
        elif name == b"data":
            _check_form(form)
            # A length that was not known is 0 or as large as can be: the samples go to the end then.
            end = body + size if size else len(data)
            return data[body : min(end, len(data))]
        place = body + size + size % 2
    else:
        raise BadAudio(
            f"is a WAV file with more than {CHUNKS_MAX} chunks before its samples; {CONVERT}"
        )
    raise BadAudio(f"is a WAV file without samples; {CONVERT}")


def _check_form(form: bytes) -> None:
    if len(form) < 16:
        raise BadAudio(f"is a WAV file that does not say what its samples are; {CONVERT}")
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", form)
    if kind == _EXTENSIBLE and len(form) >= 26:
        kind = struct.unpack_from("<H", form, 24)[0]
    if (kind, channels, rate, bits) != (_PCM, 1, SAMPLES_A_SECOND, 8 * SAMPLE_BYTES):
        coded = "" if kind == _PCM else f" of encoding {kind}"
        raise BadAudio(
            f"has {rate} Hz, {channels} channel{'' if channels == 1 else 's'}, {bits} bits{coded}; "
            f"wanted are {SAMPLES_A_SECOND} Hz, 1 channel, 16 bits of PCM: {CONVERT}"
        )


def chunks_of(pcm: bytes, chunk_s: float) -> Iterator[bytes]:
    """The chunks of the samples ``pcm``, in order: at least one; only the last may be shorter than ``chunk_s``."""
    size = int(chunk_s * BYTES_A_SECOND) // SAMPLE_BYTES * SAMPLE_BYTES
    step = size - 2 * (size // SAMPLE_BYTES // SHARED) * SAMPLE_BYTES
    for start in range(0, max(1, len(pcm)), step):
        yield pcm[start : start + size]
        if start + size >= len(pcm):
            return


def overlap(left: Sequence[int], right: Sequence[int]) -> tuple[int, int]:
    """Where the text goes over from ``left`` to ``right``: it is ``left[:a] + right[b:]``.

    Without two tokens that agree it is all of both.
    """
    best, found = 0.0, (len(left), 0)
    for shift in range(1, len(left) + len(right)):
        left_from, right_from = max(0, len(left) - shift), max(0, shift - len(left))
        one, other = left[left_from:], right[right_from:shift]
        agreed = sum(map(eq, one, other))
        score = agreed / shift + shift / _LONGER
        if agreed > 1 and score > best:
            half = min(len(one), len(other)) // 2
            best, found = score, (left_from + half, right_from + half)
    return found


class JoinedTexts:
    """The tokens of chunks, joined as they come in order."""

    def __init__(self) -> None:
        self._left: list[int] = []

    def add(self, token_ids: Sequence[int]) -> list[int]:
        """The chunk that is next has these; returns the tokens of the text that are certain now."""
        until, start = overlap(self._left, token_ids)
        certain, self._left = self._left[:until], list(token_ids[start:])
        return certain

    def end(self) -> list[int]:
        """There are no more chunks; returns the rest."""
        rest, self._left = self._left, []
        return rest
