"""Look-alike characters: the confusables of UTS #39, and the letters of other scripts that look like Latin ones.

The table is ``gateway/safety/data/confusables.txt``, which names its source and version.
"""

from importlib.resources import files
from typing import Final

from gateway.safety.text import ucd


def parsed() -> dict[int, str]:
    """Each character with a prototype, by code point, and its prototype (one to 18 characters)."""
    packed = files("gateway.safety").joinpath("data/confusables.txt").read_text(encoding="utf-8")
    words = "".join(line for line in packed.splitlines(True) if not line.startswith("#"))
    table: dict[int, str] = {}
    for word in words.replace(",\n", ",").split():
        prototype, _, sources = word.partition("=")
        target = "".join(chr(int(code, 16)) for code in prototype.split("."))
        for source in sources.split(","):
            first, _, last = source.partition("-")
            for code in range(int(first, 16), int(last or first, 16) + 1):
                table[code] = target
    return table


SCRIPTS: Final = (
    "CYRILLIC", "GREEK", "ARMENIAN", "CHEROKEE", "COPTIC", "LISU", "GOTHIC", "DESERET", "OLD ITALIC"
)  # fmt: skip
"""Scripts with such letters, as character names spell them."""
LATIN_RANGES: Final = "A-Za-z\xc0-\xd6\xd8-\xf6\xf8-\u024f\u1e00-\u1eff"


def _script(code: int) -> str:
    """The script of a letter that `SCRIPTS` knows, else nothing."""
    name = ucd.name(chr(code), "")
    return next((script for script in SCRIPTS if name.startswith(script)), "")


PROTOTYPES: Final = parsed()
"""Each confusable character by code point, and what it looks like."""
LOOKALIKES: Final = {
    chr(code): prototype
    for code, prototype in PROTOTYPES.items()
    if code < 0x10800 and prototype.isascii() and prototype.isalpha() and _script(code)
}
"""Each letter, and the Latin letter it looks like."""
CYRILLIC_TWINS: Final = frozenset(
    prototype for letter, prototype in LOOKALIKES.items() if _script(ord(letter)) == "CYRILLIC"
) | {"I"}
"""Latin letters that look like a Cyrillic one."""
