"""Puts the caller's own values back in the place of placeholders, also of those that come in pieces."""

from collections.abc import Mapping

from gateway.safety.redaction import Placeholders


class Restorer:
    """Shows an answer with values; holds back only what may become a placeholder of the request."""

    def __init__(self, placeholders: Placeholders) -> None:
        self._placeholders = placeholders
        self._known: Mapping[str, str] = placeholders.values
        self._held = ""

    def push(self, text: str) -> str:
        """What may be shown after ``text`` came."""
        if not self._held and "<" not in text:
            return text
        text = self._held + text
        begin = text.rfind("<")
        tail = text[begin:] if begin >= 0 else ""
        if tail and not any(known != tail and known.startswith(tail) for known in self._known):
            tail = ""
        self._held = tail
        return self._placeholders.restore(text[: len(text) - len(tail)])

    def finish(self) -> str:
        """The rest, when no more text comes."""
        held, self._held = self._held, ""
        return held
