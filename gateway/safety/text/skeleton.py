"""The skeleton of a text: a view for detection only, in which look-alikes of ASCII are ASCII.

`Skeleton` is anchored on ASCII, so that rules are written in plain words: ASCII stays as it is, and
every other character that looks like ASCII becomes what it looks like: the prototype of UTS #39
(Cyrillic "о" is "o"), the compatibility decomposition (mathematical, full-width, circled,
ligatures), the digit (Arabic-Indic five is "5"), letters without their accents and other marks,
small capitals, negative circled and squared letters, regional indicators. All else stays. Letters
of scripts that do not mimic Latin (Arabic, Hebrew, Indic, East Asian) stay too, or ordinary text in
them would turn into noise.
"""

from functools import cached_property
from typing import Final

from gateway.safety.text import ucd

_LOOKS: Final = ucd.by_character("looks")
"""ASCII look of each character that has another one than itself, by code point."""


class Skeleton:
    """The skeleton of a text.

    Attributes:
        text: look of the text; for ASCII the text itself.
    """

    def __init__(self, original: str) -> None:
        self._original = original
        self.text = original if original.isascii() else original.translate(_LOOKS)

    def original_span(self, start: int, end: int) -> tuple[int, int]:
        """Return the span of the original that `text[start:end]` stands for, with the omitted marks inside."""
        first = self._origins[start]
        return first, (self._origins[end - 1] + 1 if end > start else first)

    @cached_property
    def _origins(self) -> list[int]:
        """For each character the offset of the one it stands for, and at the end the length."""
        lengths = [len(_LOOKS.get(ord(character), " ")) for character in self._original]
        origins = [at for at, length in enumerate(lengths) for _ in range(length)]
        return [*origins, len(self._original)]
