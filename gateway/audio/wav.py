"""Reads WAV files (RIFF): 16 kHz, one channel, 16 bits. Others are refused with what to do; nothing is resampled.

The standard library's `wave` refuses the extensible format before Python 3.12, and files whose length was not known
when their head was written, as programs write them to a pipe.
"""

import struct
from typing import Final

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
