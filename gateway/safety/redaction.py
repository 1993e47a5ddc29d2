"""Placeholders for redacted values, such as ``<EMAIL_1>``, and their restoration.

One `Placeholders` belongs to one request. It follows from the texts of the prompt alone, so a resumed call that brings
the same prompt gets the same placeholders. It contains the redacted values: it is never logged and never leaves the
gateway.
"""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

_SHAPE: Final = re.compile(r"<[A-Z][A-Z0-9_]{0,63}_[0-9]{1,9}>")
_NO_NAME: Final = re.compile(r"[^A-Z0-9]+")


class Placeholders:
    """The placeholders of one request: the same value gets the same one, and none is text that the prompt has."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        """Reserves what looks like a placeholder in ``texts``, all texts of the prompt before any redaction."""
        self._reserved = frozenset(shape for text in texts for shape in _SHAPE.findall(text))
        self._by_value: dict[tuple[str, str], str] = {}
        self._values: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    @property
    def values(self) -> Mapping[str, str]:
        """What each placeholder stands for."""
        return MappingProxyType(self._values)

    def of(self, rule: str, value: str) -> str:
        """The placeholder of ``value``, which ``rule`` found; a new one when there is none."""
        kind = kind_of(rule)
        known = self._by_value.get((kind, value))
        if known is None:
            known = self._by_value[kind, value] = self._new(kind)
            self._values[known] = value
        return known

    def restore(self, text: str) -> str:
        """``text`` with the values back in the place of the placeholders. Values are not looked into again."""
        return _SHAPE.sub(lambda match: self._values.get(match[0], match[0]), text)

    def for_answer(self) -> "Placeholders":
        """A copy for the answer: values added to the copy cannot be restored from this one."""
        copy = Placeholders()
        copy._reserved = self._reserved
        copy._by_value = dict(self._by_value)
        copy._values = dict(self._values)
        copy._counts = dict(self._counts)
        return copy

    def _new(self, kind: str) -> str:
        while True:
            self._counts[kind] = number = self._counts.get(kind, 0) + 1
            placeholder = f"<{kind}_{number}>"
            if placeholder not in self._reserved:
                return placeholder


def kind_of(rule: str) -> str:
    """The word in a placeholder: the last part of the rule's name, "pii.us_ssn" gives "US_SSN"."""
    name = _NO_NAME.sub("_", rule.rpartition(".")[2].upper()).strip("_")[:48]
    return name if name[:1].isalpha() else f"VALUE_{name}".rstrip("_")
