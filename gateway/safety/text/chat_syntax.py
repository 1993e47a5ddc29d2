"""Breaks chat-template syntax and special tokens in a user's text by a visible space.

A space is inserted after the first character: ``<|im_start|>`` becomes ``< |im_start|>``. No text is lost and the
change is visible. Prompts are encoded with special tokens disabled anyway; with the space the model does not even see a
look-alike of its own syntax.

Found are the tokens of a list, letter for letter, and everything of the shape ``<|name|>``; styled letters count as
what they stand for (full-width ``＜｜ｅｏｔ｜＞``). ``<s>`` and ``</s>`` are also HTML (text struck through): a pair of
them stays, one without its partner does not.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from gateway.safety.findings import Severity
from gateway.safety.text.styled import PLAIN_OF, STYLED
from gateway.safety.text.trail import OffsetEdit, Trail

RULE: Final = "syntax.chat_template"

DEFAULT_TOKENS: Final = (
    # Llama 2, Mistral
    "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CONTENT]", "[/TOOL_CONTENT]",
    "[THINK]", "[/THINK]",
    # Gemma
    "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<start_function_call>",
    # Qwen, Hermes, DeepSeek and others: tools and thoughts
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
    # Ends and fillers of many vocabularies
    "<bos>", "<eos>", "<pad>", "<unk>", "<s>", "</s>",
)  # fmt: skip

_SHAPES: Final = r"<\|[^\s<>|]{1,64}\|>"
"""ChatML, Llama 3, Phi, Granite, GPT, DeepSeek: names between bars."""
_OPEN, _CLOSE = "<s>", "</s>"
_STYLED_RUN = re.compile(f"[{STYLED}\uff01-\uff5e]+")


class ChatSyntax:
    """The tokens that a user's text must not contain. Made once for a policy; stateless."""

    def __init__(self, tokens: Iterable[str] = DEFAULT_TOKENS) -> None:
        """Raises ValueError for a token that a space cannot break."""
        distinct = sorted(set(tokens), key=len, reverse=True)
        for token in distinct:
            if len(token) < 2:
                raise ValueError(f"a chat-template token has two characters or more, not {token!r}")
        firsts = "".join(sorted({re.escape(token[0]) for token in distinct} | {"<"}))
        leads = [chr(code) for code, plain in PLAIN_OF.items() if re.search(f"[{firsts}]", plain)]
        self._lead = re.compile(f"[{firsts}{''.join(map(re.escape, leads))}]")
        rests = "|".join([_SHAPES, *map(re.escape, distinct)])
        # Only the first character is consumed, the rest is a look-ahead: tokens inside tokens are found too.
        self._token = re.compile(f"[{firsts}](?<=(?=({rests})).)", re.DOTALL)
        for token in distinct:
            if self._starts(self._neutral(token, self._starts(token))):
                raise ValueError(
                    f"a space behind its first character makes another token of {token!r}"
                )

    def neutralize(self, trail: Trail) -> None:
        """Breaks every token in the text, and flags it."""
        before = trail.text
        found = self._starts(before)
        if not found:
            return
        trail.flag_all(RULE, found, Severity.MEDIUM)
        trail.advance(
            self._neutral(before, found),
            lambda: (OffsetEdit(start, start + 1, 2) for start, _ in found),
        )

    def _starts(self, text: str) -> list[tuple[int, int]]:
        """Where tokens start and end, by start."""
        if self._lead.search(text) is None:
            return []
        seen = text
        if not text.isascii():
            seen = _STYLED_RUN.sub(lambda match: match[0].translate(PLAIN_OF), text)
        found = [match.span(1) for match in self._token.finditer(seen)]
        return _without_pairs(seen, found) if found else found

    @staticmethod
    def _neutral(text: str, found: Sequence[tuple[int, int]]) -> str:
        """``text`` with a space behind the first character of each token."""
        parts = []
        position = 0
        for start, _ in found:
            parts += [text[position : start + 1], " "]
            position = start + 1
        parts.append(text[position:])
        return "".join(parts)


def _without_pairs(text: str, found: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """``found`` without ``<s>`` and ``</s>`` that belong together."""
    paired: set[int] = set()
    opened: list[int] = []
    for start, end in found:
        token = text[start:end]
        if token == _OPEN:
            opened.append(start)
        elif token == _CLOSE and opened:
            paired.update((opened.pop(), start))
    return [span for span in found if span[0] not in paired] if paired else found


DEFAULT_SYNTAX: Final = ChatSyntax()
