"""Turns tokens into text one at a time, holding back characters that are not complete.

A byte-level tokenizer may split one character over several tokens; until it is whole the decoder shows U+FFFD at
the end, and the text is held back (tokenizers' ``DecodeStream`` does the book-keeping).
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from typing_extensions import override

_NONE: Final[Mapping[int, str]] = MappingProxyType({})


class Detokenizer(Protocol):
    """Text of a growing list of tokens."""

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; may be empty."""

    def flush(self) -> str:
        """What was held back, when no more tokens come; U+FFFD stands for bytes that are no character."""


class StreamDetokenizer(Detokenizer):
    """`Detokenizer` of a Hugging Face tokenizer; special and ``hidden`` tokens have no text, but ``shown`` ones."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        shown: Mapping[int, str] = _NONE,
        hidden: Collection[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._special = shown
        self._hidden = hidden
        self._stream = DecodeStream(skip_special_tokens=True)
        # Tokens of the last piece of text, and those since: enough to decode what is held back in its context.
        self._shown: list[int] = []
        self._held: list[int] = []

    @override
    def push(self, token_id: int) -> str:
        if token_id in self._special:
            before, self._shown = self.flush(), []
            self._stream = DecodeStream(skip_special_tokens=True)
            return before + self._special[token_id]
        if token_id in self._hidden:
            return ""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:
            # "Invalid prefix": some decoders change earlier text in hindsight. The held tokens are decoded
            # as they stand.
            text = self._held_text()
            self._stream = DecodeStream(skip_special_tokens=True)
        if text is None:
            return ""
        self._shown, self._held = self._held, []
        return text

    @override
    def flush(self) -> str:
        text = self._held_text()
        self._shown, self._held = self._held, []
        return text

    def _held_text(self) -> str:
        shown = self._tokenizer.decode(self._shown, skip_special_tokens=True)
        both = self._tokenizer.decode(self._shown + self._held, skip_special_tokens=True)
        return both[len(shown) :]
