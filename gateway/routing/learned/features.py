"""Features of a prompt for learned routers: its words, marks and sizes, hashed into buckets.

Head and tail of a long prompt are read, so a decision costs the same for 2 kB and 2 MB.
"""

import re
from math import log2
from typing import Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

HASHED: Final = 1 << 15
"""Number of buckets."""
READ_CHARS_MAX: Final = 1_200
"""Length of a prompt that is read, head and tail together, in characters."""

_TOKEN: Final = re.compile(r"[^\W\d_]+(?:'[a-z]+)?|[0-9]+(?:[.,][0-9]+)*")
_MARK: Final = re.compile(r"[^\w\s]")
_OPTION: Final = re.compile(r"^\(?[A-Ea-e1-9][.)][ \t]", re.MULTILINE)


def buckets(prompt: str) -> NDArray[np.int64]:
    """Return the distinct buckets of a prompt in ascending order, equal in every process."""
    read = ends(prompt, READ_CHARS_MAX)
    tokens = _TOKEN.findall(read.lower())
    numbers = sum("0" <= token[0] <= "9" for token in tokens)
    sizes = {"chars": len(prompt), "numbers": numbers, "lines": read.count("\n")}
    features = {
        *tokens,
        *_MARK.findall(read),
        # A bucket for each half power of two: sizes say more by their ratio than by their difference.
        *(f"#{name} {int(2 * log2(1 + size))}" for name, size in sizes.items()),
        f"#options {len(_OPTION.findall(read))}",
        f"#ends {read.rstrip()[-1:]}",
    }
    return np.unique([crc32(feature.encode(errors="replace")) % HASHED for feature in features])


def ends(text: str, chars_max: int) -> str:
    """Return `text`, or its head and tail on two lines if it is longer than `chars_max`."""
    if len(text) <= chars_max:
        return text
    half = chars_max // 2
    return f"{text[:half]}\n{text[-half:]}"
