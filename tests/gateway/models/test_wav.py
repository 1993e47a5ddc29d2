"""WAV files: what is taken, and that nothing else than one clear error comes of all others."""

import io
import random
import struct
import wave
from contextlib import suppress

import pytest

from gateway.models.speech import BadAudio, pcm_of_wav
from tests.support.sounds import sound, wav

PCM = sound(0.1)


def written() -> bytes:
    """By the standard library."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(16_000)
        writer.writeframes(PCM)
    return file.getvalue()


def extensible() -> bytes:
    form = struct.pack("<HHIIHHHHI", 0xFFFE, 1, 16_000, 32_000, 2, 16, 22, 16, 4)
    form += struct.pack("<H", 1) + b"\x00\x00\x00\x00\x10\x00\x80\x00\x00\xaa\x00\x38\x9b\x71"
    extra = b"LIST" + struct.pack("<I", 3) + b"abc\x00"
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + extra
    return b"RIFF\x00\x00\x00\x00" + body + b"data" + struct.pack("<I", len(PCM)) + PCM


@pytest.mark.parametrize(
    "data",
    [
        written(),
        wav(PCM),
        extensible(),
        wav(PCM).replace(struct.pack("<I", len(PCM)) + PCM, b"\xff\xff\xff\xff" + PCM),
        wav(PCM).replace(struct.pack("<I", len(PCM)) + PCM, b"\x00\x00\x00\x00" + PCM),
    ],
    ids=["standard library", "plain", "extensible", "length unknown", "length 0"],
)
def test_samples_are_those_of_the_file(data: bytes) -> None:
    assert pcm_of_wav(data) == PCM


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a WAV file"),
        (b"ID3\x04 mp3", "not a WAV file"),
        (wav(PCM, rate=44_100), "has 44100 Hz, 1 channel, 16 bits; must have 16000 Hz"),
        (wav(PCM, channels=2), "2 channels"),
        (wav(PCM, bits=24), "24 bits"),
        (wav(PCM).replace(b"fmt \x10\x00\x00\x00\x01", b"fmt \x10\x00\x00\x00\x03"), "encoding 3"),
        (wav(PCM)[:30], "without samples"),
        (wav(PCM)[:12] + b"junk\x00\x00\x00\x00" * 257 + wav(PCM)[12:], "more than 256 chunks"),
        (b"RIFF\x00\x00\x00\x00WAVEdata\x02\x00\x00\x00ab", "truncated format chunk"),
    ],
)
def test_other_files_are_refused_with_what_to_do(data: bytes, words: str) -> None:
    with pytest.raises(BadAudio, match=words) as raised:
        pcm_of_wav(data)
    assert "ffmpeg" in str(raised.value)


def test_broken_files_raise_nothing_else() -> None:
    draw = random.Random(1)
    for whole in (wav(PCM), extensible()):
        for _ in range(2000):
            data = bytearray(whole[: draw.randrange(len(whole))])
            for _ in range(draw.randrange(4)):
                if data:
                    data[draw.randrange(min(len(data), 60))] = draw.randrange(256)
            with suppress(BadAudio):
                assert len(pcm_of_wav(bytes(data))) <= len(data)
