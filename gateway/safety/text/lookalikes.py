"""Letters of other scripts that look like Latin ones, from the confusables of UTS #39."""

from typing import Final

from gateway.safety.text import ucd
from gateway.safety.text.confusables import parsed

SCRIPTS: Final = (
    "CYRILLIC",
    "GREEK",
    "ARMENIAN",
    "CHEROKEE",
    "COPTIC",
    "LISU",
    "GOTHIC",
    "DESERET",
    "OLD ITALIC",
)
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
