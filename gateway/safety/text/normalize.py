r"""Normalizes prompts: the text for the model, a finding for every change, and a map to the original offsets.

The steps, in order: ANSI escape sequences, line ends and odd characters, isolates, invisible
characters, styled letters, canonical composition with a limit on marks; then chat-template syntax
is broken. Visible text of any script, emoji and code come out as they went in, in NFC.

Text that a step changed is processed again, because removing a character can join others. If it
still changes in the second pass, the last pass removes all invisible characters. So the result is
stable: normalizing it again changes nothing.

Everything is linear in the length of the text. A clean text is the same object before and after.

- ANSI escape sequences are removed whole, with parameters and titles. One that never ends loses
  only its escape character (as a control character): what follows stays visible.
- Line ends (CRLF, CR, VT, FF, NEL, LS, PS) become `\n` without a finding. Lone surrogates and
  noncharacters become U+FFFD. Hangul fillers with a width, and the braille blank in a text without
  braille, become a space.
"""

import re
from typing import Final

from gateway.safety.findings import Severity
from gateway.safety.text import characters as c
from gateway.safety.text import ucd
from gateway.safety.text.edited_text import EditedText
from gateway.safety.text.invisible import strip, strip_all

RULE_INVISIBLE_ONLY: Final = "unicode.invisible_only"

# Chat-template syntax and special tokens are broken by a visible space behind their first character:
# `<|im_start|>` becomes `< |im_start|>`. No text is lost, and the model does not even see a look-alike of its own
# syntax (prompts are encoded with special tokens disabled anyway).
#
# Broken are the tokens of a list, letter for letter, and everything of the shape `<|name|>`; styled letters count as
# what they stand for (full-width `＜｜ｅｏｔ｜＞`). `<s>` and `</s>` are also HTML (text struck through): a pair
# stays, one without its partner does not.

_SYNTAX_RULE: Final = "syntax.chat_template"

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
_STYLED_FIRSTS: Final = {chr(code) for code, plain in c.PLAIN_OF.items() if plain in FIRSTS}
_LEAD: Final = re.compile(f"[{''.join(map(re.escape, FIRSTS | _STYLED_FIRSTS))}]")
_LONGEST_FIRST: Final = sorted(TOKENS, key=len, reverse=True)
# Only the first character is consumed, the rest is a look-ahead: tokens inside tokens are found too.
_TOKEN: Final = re.compile(
    f"[{''.join(map(re.escape, FIRSTS))}](?<=(?=({'|'.join([_SHAPES, *map(re.escape, _LONGEST_FIRST)])})).)",
    re.DOTALL,
)
_STYLED_RUN: Final = re.compile(f"[{c.STYLED}\uff01-\uff5e]+")

_ASCII_CONTROLS = "\x00-\x08\x0b-\x1f\x7f"
_ASCII_ODD = re.compile(f"[{_ASCII_CONTROLS}]")
NOT_PLAIN_ASCII: Final = re.compile(f"[{_ASCII_CONTROLS}{''.join(map(re.escape, FIRSTS))}]")
"""Characters of ASCII that normalization may change; other texts of ASCII stay as they are."""


def normalize(text: str) -> EditedText:
    """Return the model's view of `text`. Never raises: lone surrogates become U+FFFD.

    The result has at most four times as many characters, and is stable.
    """
    edited = EditedText(text)
    if not text.isascii() or _ASCII_ODD.search(text):
        _clean(edited)
    _neutralize(edited)
    return edited


def _clean(edited: EditedText) -> None:
    """Run all steps that look at single characters, until nothing changes."""
    original = edited.text
    _remove_escapes(edited)
    for is_last in (False, False, True):
        before = edited.text
        # Most texts have nothing that a step looks at.
        if not c.CHANGEABLE.isdisjoint(before):
            _replace_odd(edited)
            if is_last:
                strip_all(edited)
            else:
                strip(edited)
            _fold_full_width(edited)
            _fold_styled(edited)
            _limit_marks(edited)
        _compose(edited)
        # Stable: nothing that was removed has joined others.
        if edited.text == before:
            break
    if original and not original.isspace() and (not edited.text or edited.text.isspace()):
        edited.flag_whole(RULE_INVISIBLE_ONLY, Severity.HIGH)


# ANSI escape sequences.

_ANSI: Final = "unicode.ansi"
_STARTS = re.compile("[\x1b\x90\x98\x9b\x9d-\x9f]")
# Strings (OSC, DCS, SOS, PM, APC) run to BEL or ST. None holds the start of another, so no text is read twice.
_STRING_BODY = "[^\x07\x1b\x80-\x9f]*+(?:\x07|\x9c|\x1b\\\\)"
_SEQUENCE = re.compile(
    "\x1b(?:"
    r"\[[0-?]*+[ -/]*+[@-~]"  # CSI: colours, cursor
    rf"|[\]PX^_]{_STRING_BODY}"
    r"|[ -/]{1,4}[0-~]"  # character sets
    r"|[0-?@-OQ-WYZ`-~])"  # single functions: reset, save, index
    # The 8-bit forms are letters in Windows encodings that were decoded wrongly: only certain sequences count.
    r"|\x9b[0-?]++[ -/]*+[@-~]"
    rf"|[\x90\x98\x9d-\x9f]{_STRING_BODY}"
)


def _remove_escapes(edited: EditedText) -> None:
    """Remove ANSI escape sequences, 7-bit and 8-bit."""
    if _STARTS.search(edited.text) is not None:
        spans = [match.span() for match in _SEQUENCE.finditer(edited.text)]
        edited.flag_all(_ANSI, spans, Severity.MEDIUM)
        edited.remove(spans)


# Line ends and odd characters.

REPLACEMENT: Final = "\ufffd"

_CRLF = re.compile("\r\n")
_BRAILLE = re.compile(f"[{c.BRAILLE}]")
_REPLACED: Final = tuple(
    (rule, re.compile(f"[{chars}]+"), dict.fromkeys(c.members(chars), plain))
    for rule, chars, plain in (
        ("", c.LINE_ENDS, "\n"),
        ("unicode.surrogate", c.SURROGATES, REPLACEMENT),
        ("unicode.noncharacter", c.NONCHARACTERS, REPLACEMENT),
        ("unicode.blank", c.BLANKS, " "),
        ("unicode.blank", c.BRAILLE_BLANK, " "),
    )
)
"""Odd characters and what they become, each with the rule that flags them; braille stands last."""


def _replace_odd(edited: EditedText) -> None:
    """Replace odd characters by plain ones."""
    edited.replace((*match.span(), "\n") for match in _CRLF.finditer(edited.text))
    has_braille = _BRAILLE.search(edited.text) is not None
    for rule, pattern, table in _REPLACED[:-1] if has_braille else _REPLACED:
        if spans := [match.span() for match in pattern.finditer(edited.text)]:
            edited.advance(edited.text.translate(table))
            if rule:
                edited.flag_all(rule, spans, Severity.LOW)


# Styled letters (full-width, mathematical, circled, squared, raised) become ASCII where they spell words.
#
# NFKC would fold all compatibility characters, and with them much that people mean: superscripts, fractions,
# ligatures, the full-width punctuation of Chinese and Japanese. So only letters that stand for ASCII are folded, one
# for one, and only where they are no notation: full-width characters in a text without any CJK character, and runs of
# other styled letters. A single mathematical letter, a raised ordinal or full-width Latin in Japanese stays.
# `skeleton` folds those too, for the rules.

RUN_MIN = 4
"""Styled letters in a row that spell a word and are no product of variables."""
SPREAD_MIN = 6
"""Styled letters with single separators between that spell words."""
_STYLED_RULE: Final = "unicode.styled"
_FULL_WIDTH_RULE: Final = "unicode.full_width"

_STYLED = f"[{c.STYLED}]"
_SEPARATOR = "[ '’,.!?_-]"
_STYLED_FIRST = re.compile(_STYLED)
# Four letters or more, or no match is made at all: formulas have many single letters. No possessive group: up to Python
# 3.11.4 one keeps what its last, failed round has read (gh-106052).
_STYLED_WORDS = re.compile(
    f"{_STYLED}(?=(?:{_SEPARATOR}?{_STYLED}){{3}}){_STYLED}*+(?>(?:{_SEPARATOR}{_STYLED}++)*)"
)
_STYLED_WORD = re.compile(f"{_STYLED}{{{RUN_MIN}}}")
_FULL_WIDTH = re.compile("[\uff01-\uff5e]+")
_CJK = re.compile(f"[{c.CJK}]")


def _fold_full_width(edited: EditedText) -> None:
    """Fold full-width characters outside CJK text."""
    if _CJK.search(edited.text) is None:
        spans = (match.span() for match in _FULL_WIDTH.finditer(edited.text))
        edited.flag_all(_FULL_WIDTH_RULE, spans, Severity.LOW)
        edited.advance(_FULL_WIDTH.sub(_plain, edited.text))


def _plain(match: "re.Match[str]") -> str:
    return match[0].translate(c.PLAIN_OF)


def _fold_styled(edited: EditedText) -> None:
    """Fold words of other styled letters."""

    def folded(match: "re.Match[str]") -> str:
        words = match[0]
        if _STYLED_WORD.search(words) is None and len(_STYLED_FIRST.findall(words)) < SPREAD_MIN:
            return words
        edited.flag(_STYLED_RULE, match.start(), match.end(), Severity.LOW)
        return _plain(match)

    edited.advance(_STYLED_WORDS.sub(folded, edited.text))


# Canonical composition (NFC), and a limit on combining marks.
#
# NFC changes how a text is stored and not how it looks, with one exception that is left out: compatibility ideographs,
# which it would turn into others. It turns one character into at most three (and UTF-8 bytes into at most three times
# as many), by its definition.

MARKS_MAX = 16
"""Combining marks on one character. Tibetan stacks and Hebrew accents need at most nine."""
_FLOOD_RULE: Final = "unicode.combining_flood"

# The class of marks is slow, so what cannot be a flood is left out first: no mark is a letter, a digit or a space.
_FLOOD = re.compile(f"(?=[^\\w\\s\x00-\u02ff]{{{MARKS_MAX + 1}}})[{c.MARKS}]{{{MARKS_MAX + 1},}}")
_CLUSTERS = re.compile(
    "[^{0}{1}]?[{0}]+|[{2}]".format(
        ucd.TABLES["composing"], c.COMPATIBILITY_HAN, ucd.TABLES["composed"]
    )
)
"""Every stretch that NFC could change, by itself and apart from what stands around it."""


def _compose(edited: EditedText) -> None:
    """Bring the text to NFC, with at most `MARKS_MAX` marks on a character."""
    before = edited.text
    if ucd.normalize("NFC", before) != before:
        # Cluster by cluster, so that each character keeps its origin.
        clusters = ((match, ucd.normalize("NFC", match[0])) for match in _CLUSTERS.finditer(before))
        edited.replace((*match.span(), new) for match, new in clusters if new != match[0])
        _limit_marks(edited)


def _limit_marks(edited: EditedText) -> None:
    """Remove the marks beyond the limit of their character."""
    floods = [(match.start() + MARKS_MAX, match.end()) for match in _FLOOD.finditer(edited.text)]
    edited.flag_all(_FLOOD_RULE, floods, Severity.MEDIUM)
    edited.remove(floods)


def _neutralize(edited: EditedText) -> None:
    """Break every token in the text, and flag it."""
    text = edited.text
    # Most texts have no character that a token begins with.
    if _LEAD.search(text) is None:
        return
    if not text.isascii():
        text = _STYLED_RUN.sub(lambda match: match[0].translate(c.PLAIN_OF), text)
    tokens = _without_pairs(text, [match.span(1) for match in _TOKEN.finditer(text)])
    if tokens:
        edited.flag_all(_SYNTAX_RULE, tokens, Severity.MEDIUM)
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
