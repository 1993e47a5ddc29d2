"""Breaks chat-template syntax and special tokens in a user's text by a visible space.

A space is inserted after the first character: `<|im_start|>` becomes `< |im_start|>`. No text is
lost and the change is visible. Prompts are encoded with special tokens disabled anyway; with the
space the model does not even see a look-alike of its own syntax.

Broken are the tokens of a list, letter for letter, and everything of the shape `<|name|>`; styled
letters count as what they stand for (full-width `＜｜ｅｏｔ｜＞`). `<s>` and `</s>` are also HTML (text
struck through): a pair of them stays, one without its partner does not.
"""

import re
from typing import Final

from gateway.safety.findings import Severity
from gateway.safety.text.characters import PLAIN_OF, STYLED
from gateway.safety.text.edited_text import EditedText

RULE: Final = "syntax.chat_template"

TOKENS: Final = (
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
FIRSTS: Final = {token[0] for token in TOKENS} | {"<"}
"""Characters that a token can begin with."""
_STYLED_FIRSTS: Final = {chr(code) for code, plain in PLAIN_OF.items() if plain in FIRSTS}
_LEAD: Final = re.compile(f"[{''.join(map(re.escape, FIRSTS | _STYLED_FIRSTS))}]")
_LONGEST_FIRST: Final = sorted(TOKENS, key=len, reverse=True)
# Only the first character is consumed, the rest is a look-ahead: tokens inside tokens are found too.
_TOKEN: Final = re.compile(
    f"[{''.join(map(re.escape, FIRSTS))}](?<=(?=({'|'.join([_SHAPES, *map(re.escape, _LONGEST_FIRST)])})).)",
    re.DOTALL,
)
_STYLED_RUN: Final = re.compile(f"[{STYLED}\uff01-\uff5e]+")


def neutralize(edited: EditedText) -> None:
    """Break every token in the text, and flag it."""
    text = edited.text
    # Most texts have no character that a token begins with.
    if _LEAD.search(text) is None:
        return
    if not text.isascii():
        text = _STYLED_RUN.sub(lambda match: match[0].translate(PLAIN_OF), text)
    tokens = _without_pairs(text, [match.span(1) for match in _TOKEN.finditer(text)])
    if tokens:
        edited.flag_all(RULE, tokens, Severity.MEDIUM)
        edited.replace((start, start + 1, f"{edited.text[start]} ") for start, _ in tokens)


def _without_pairs(text: str, tokens: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return `tokens` without `<s>` and `</s>` that belong together."""
    paired: set[int] = set()
    opened: list[int] = []
    for start, end in tokens:
        token = text[start:end]
        if token == _OPEN:
            opened.append(start)
        elif token == _CLOSE and opened:
            paired.update((opened.pop(), start))
    return [span for span in tokens if span[0] not in paired] if paired else tokens
