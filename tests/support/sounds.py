"""Sounds for models that take audio."""

import random
import struct

import numpy as np


def sound(seconds: float, seed: int = 0) -> bytes:
    """Tones that change ten times a second: 16 kHz, one channel, 16 bits."""
    draw, parts, count = random.Random(seed), [], round(16_000 * seconds)
    for start in range(0, count, 1600):
        pitch, loud = draw.uniform(80, 4000), draw.uniform(500, 12_000)
        places = np.arange(start, min(start + 1600, count))
        parts.append((loud * np.sin(2 * np.pi * pitch * places / 16_000)).round().astype("<i2"))
    return b"".join(part.tobytes() for part in parts)


def wav(pcm: bytes, *, rate: int = 16_000, channels: int = 1, bits: int = 16) -> bytes:
    """A WAV file."""
    block = channels * bits // 8
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * block, block, bits)
    head = b"WAVEfmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", len(pcm))
    return b"RIFF" + struct.pack("<I", len(head) + len(pcm)) + head + pcm
