"""Text as token ids without loss, for servers that take and give text (`engine: openai`).

Tasks and frames hold token ids. A byte-level vocabulary has a token for every byte, so any text can be written in it
and comes back as it was, once nothing normalizes the text and no part of it is read as a control token. So this is the
model's own tokenizer without normalizer and added tokens; it counts nearly as the whole tokenizer does.

Two tokens are added behind the vocabulary. No text contains them: `CONVERSATION` comes before messages as JSON, `END`
stands where a model has its end token.

What a server sends as reasoning, apart from the text of the answer, stands in the same text between `REASONING` and
`REASONING_END`: so safety rules, resumed calls and kept answers have it too. They are characters that no text has.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, pre_tokenizers

from sluice.errors import SettingsError

CONVERSATION: Final = "<|sluice_conversation|>"
END: Final = "<|sluice_end|>"
REASONING: Final = "\x0e"
REASONING_END: Final = "\x0f"
_NO_TEXT: Final = dict.fromkeys(map(ord, (REASONING, REASONING_END)), "\ufffd")

TEMPLATE: Final = (
    CONVERSATION
    + '{{ ([messages, tools] if tools else [messages]) | tojson | replace("<|", "\\\\u003c|") }}'
)
"""The chat template that writes messages and tools as JSON; they never contain `CONVERSATION` literally."""


_LOSSES: Final[Mapping[str, Any]] = {
    "normalizer": None,
    "post_processor": None,
    "truncation": None,
    "padding": None,
    "added_tokens": [],
}
"""Parts of a tokenizer that change a text."""
_SAMPLES: Final = (
    "a",
    " a",
    "a  b\n",
    "e\u0301\ufb01\u00a0",
    "\u4e2d\U0001f600",
    "<|im_end|></s>[INST]",
)


def without_marks(text: str) -> str:
    """Return the `text` of a server; of the marks of reasoning U+FFFD is left."""
    if REASONING not in text and REASONING_END not in text:
        return text
    return text.translate(_NO_TEXT)


class TextTokens:
    """One vocabulary.

    Attributes:
        tokenizer: with the two added tokens.
        conversation: the id of `CONVERSATION`, above all ids of text.
        end: the id of `END`.
    """

    def __init__(self, serialized: str) -> None:
        """Load a tokenizer that loses nothing.

        Raises:
            SettingsError: it loses something.
        """
        self._text = Tokenizer.from_str(serialized)
        self._check()
        self.tokenizer = Tokenizer.from_str(serialized)
        self.conversation = self.tokenizer.get_vocab_size()
        self.end = self.conversation + 1
        self.tokenizer.add_special_tokens([CONVERSATION, END])

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`; half a surrogate pair becomes U+FFFD."""
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return list(self._text.encode(whole, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`; the added tokens have none."""
        return str(self._text.decode([one for one in token_ids if one < self.conversation]))

    def _check(self) -> None:
        vocabulary = self._text.get_vocab(with_added_tokens=False)
        if not set(pre_tokenizers.ByteLevel.alphabet()) <= vocabulary.keys():
            raise SettingsError("has no token for every byte")
        if max(vocabulary.values()) >= len(vocabulary):
            raise SettingsError("has gaps between its token ids")
        parts = [self._text.encode(text, add_special_tokens=False).ids for text in _SAMPLES]
        if self._text.decode([one for part in parts for one in part]) != "".join(_SAMPLES):
            raise SettingsError("does not give a text back as it was")


def load_text_tokens(file: Path) -> TextTokens:
    """Return the vocabulary of `file`, a tokenizer.json.

    Raises:
        SettingsError: it is no tokenizer that gives every text back.
    """
    try:
        serialized = json.loads(file.read_text(encoding="utf-8"))
        return TextTokens(json.dumps({**serialized, **_LOSSES}))
    except SettingsError as error:
        raise SettingsError(
            f"{file}: {error}, which a model whose server speaks text needs; take the tokenizer of GPT-2, Llama 3, "
            'Qwen, or "builtin:small"'
        ) from error
    except Exception as error:  # the library raises nothing more specific
        raise SettingsError(f"{file}: is not a tokenizer: {error}") from error
