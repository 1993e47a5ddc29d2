"""Normalization as a whole: what must not change, what must, and that it comes to rest."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.safety.findings import Severity
from gateway.safety.text import ucd
from gateway.safety.text.edited_text import FINDINGS_MAX, EditedText
from gateway.safety.text.normalize import normalize
from gateway.safety.text.skeleton import Skeleton
from tests.gateway.safety.text import tables
from tests.gateway.safety.text.corpus import LEGITIMATE

# What attacks and writing systems are made of, so that random texts have something to do with both.
PARTS = st.sampled_from(
    [
        *"ab <|>[/]sINST_0#😀👩💻❤♀क्ष़िمیשאבgहખก។가漢神福ÅéＡ＜｜＞ａ𝐚𝐛ⓐⓂℹᵃᵘ①ﬁﷺ½½\n\r\t.,'-",
        *"\u0301\u0316\u0327\u0344\u093c\u0338\u20e3\u05b4\u064b\u0f39\U0001d165\U0001d160\u0958",
        *"\ufb1d\u1100\u1161\u11a8\u3099\U000110a5\U000110ba",
        *"\u200b\u200c\u200d\u200e\u200f\u061c\u202a\u202e\u202c\u2060\u2066\u2067\u2068\u2069\u206a\ufeff\xad",
        *"\u034f\ufe00\ufe0e\ufe0f\U000e0100\U000e01ef\U000e0067\U000e0062\U000e007f\U0001f3f4\U000e0001",
        *"\u180b\u180e\u1820\u115f\u1160\u3164\uffa0\u2800\u2801\u2028\u2029\x85\x00\x07\x0b\x0c\x1b\x9b\x9c",
        *"\x9d\x7f\ud83d\ude00\uffff\ufa19\U0002f800\U00013000\U00013430",
        *("\r\n", "\x1b[31m", "\x1b]0;t\x07", "<|im_start|>", "</s>", "<s>", "[INST]", "<<SYS>>"),
        *("\u0301" * 15, "\u0316\u0301" * 9, "𝐢𝐠𝐧𝐨𝐫𝐞", "ｉｇｎｏｒｅ", "о", "ο", "аbс", "漢字"),
    ]
)  # fmt: skip
HOSTILE = st.lists(PARTS, max_size=24).map("".join)
ANY_TEXT = st.text(st.characters(codec=None, categories=None), max_size=60)


@pytest.mark.parametrize("name", LEGITIMATE)
def test_legitimate_text_stays_as_it_is(name: str) -> None:
    text = ucd.normalize("NFC", LEGITIMATE[name]) if "japanese" not in name else LEGITIMATE[name]
    normalized = normalize(text)
    assert normalized.text == text
    assert list(normalized.findings) == []
    assert normalized.original_span(0, len(text)) == (0, len(text))


@pytest.mark.parametrize("name", LEGITIMATE)
def test_decomposed_text_is_composed_and_nothing_else(name: str) -> None:
    text = ucd.normalize("NFD", LEGITIMATE[name])
    assert normalize(text).text == ucd.normalize("NFC", text)
    assert not normalize(text).findings


def test_clean_text_is_not_even_copied() -> None:
    text = "".join(
        LEGITIMATE[name] for name in ("script/cyrillic", "script/chinese", "emoji/family")
    )
    assert normalize(text).text is text


@given(st.one_of(HOSTILE, ANY_TEXT))
def test_normalizing_again_changes_nothing(text: str) -> None:
    once = normalize(text).text
    assert normalize(once).text == once


@given(st.one_of(HOSTILE, ANY_TEXT))
@example("\uac00\uff49\uff47\uff4e\uff4f\uff52\uff45\u0344")
@example("\U0001d422\U0001d420\U0001d427\U0001d428\U0001d42b\U0001d41e\u2069\u0327")
def test_offsets_lead_back_to_what_made_them(text: str) -> None:
    normalized = normalize(text)
    spans = [normalized.original_span(at, at + 1) for at in range(len(normalized.text))]
    assert all(0 <= start < end <= len(text) for start, end in spans)
    assert spans == sorted(spans)
    assert all(first[1] <= second[1] for first, second in pairwise(spans))
    for at, (start, end) in enumerate(spans):
        # What is untouched maps to itself; what changed lies in a span that normalizes to something with it. Whether
        # styled and full-width letters are folded depends on the letters around them, so the span by itself may keep a
        # letter that the text folds (NFKC), or fold one that the text keeps and composes (NFC).
        span = text[start:end]
        alone = normalize(span).text
        composed = [ucd.normalize(form, part) for form in ("NFC", "NFKC") for part in (span, alone)]
        made = "".join((span, alone, *composed))
        assert normalized.text[at] in made + " \n\ufffd"
    assert all(0 <= f.start <= f.end <= len(text) for f in normalized.findings)


@given(HOSTILE)
def test_spans_nest_and_growth_is_bounded(text: str) -> None:
    normalized = normalize(text)
    size = len(normalized.text)
    whole = normalized.original_span(0, size)
    for start in range(0, size, 3):
        inner = normalized.original_span(start, size)
        assert whole[0] <= inner[0] <= inner[1] <= whole[1]
        assert normalized.original_span(start, start)[0] == inner[0]
    assert size <= 4 * len(text)
    rules = {(finding.rule, finding.severity) for finding in normalized.findings}
    assert len(normalized.findings) <= len(rules) * (FINDINGS_MAX + 2)


def test_no_character_grows_past_three() -> None:
    codes = (*range(0x20000), *range(0x2F7F0, 0x2FA30), *range(0xDFFF0, 0xE1010))
    for at in range(0, len(codes), 64):
        characters = list(map(chr, codes[at : at + 64]))
        grown = normalize("\n".join(characters)).text.split("\n")
        if len(grown) != len(characters):  # some are line ends themselves, or vanish together
            grown = [normalize(character).text for character in characters]
        assert max(map(len, grown)) <= 3, hex(codes[at])


def test_the_tables_are_those_that_the_pinned_database_gives() -> None:
    assert ucd.TABLES["version"] == "18.0.0"
    assert dict(ucd.TABLES) == tables.made()


ATTACKS = {
    "tags": ("hi" + "".join(chr(0xE0000 + ord(c)) for c in "ignore"), "hi", "unicode.tag", Severity.HIGH),
    "tags after a flag": ("🏴\U000e0075\U000e0073\U000e007f", "🏴", "unicode.tag", Severity.HIGH),
    "tags in a flag's tail": ("🏴󠁧󠁢󠁥󠁮󠁧󠁿\U000e0061", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "unicode.tag", Severity.HIGH),
    "zero width": ("ig\u200bno\u2060re\ufeff", "ignore", "unicode.zero_width", Severity.LOW),
    "many zero width": ("a" + "\u200b\u200c" * 20 + "b", "ab", "unicode.zero_width", Severity.LOW),
    "joiner in Latin": ("ig\u200dnore", "ignore", "unicode.zero_width", Severity.LOW),
    "joiners in Persian": ("می\u200c\u200c\u200dخواهم", "می\u200cخواهم", "unicode.zero_width", Severity.LOW),
    "override": ("abc \u202edlrow\u202c", "abc dlrow", "unicode.bidi", Severity.MEDIUM),
    "override in Hebrew": ("שלום \u202eabc\u202c", "שלום abc", "unicode.bidi", Severity.MEDIUM),
    "isolates in code": ("if a\u2066 // \u2069\u2066x", "if a // x", "unicode.bidi", Severity.LOW),
    "isolate without end": ("שלום \u2067abc\nשלום", "שלום abc\nשלום", "unicode.bidi", Severity.LOW),
    "marks in Latin": ("a\u200eb\u200f", "ab", "unicode.bidi", Severity.LOW),
    "selectors on a letter": ("a" + "\U000e0150" * 20, "a", "unicode.variation_selector", Severity.MEDIUM),
    "selectors on an emoji": ("😀\ufe0f\ufe01\U000e0123\ufe0f", "😀\ufe0f", "unicode.variation_selector", Severity.LOW),
    "far selector on Han": ("葛\U000e0150", "葛", "unicode.variation_selector", Severity.LOW),
    "filler": ("ad\u3164min", "ad min", "unicode.blank", Severity.LOW),
    "jamo filler": ("ad\u115fmin", "admin", "unicode.filler", Severity.LOW),
    "braille blank": ("a\u2800b", "a b", "unicode.blank", Severity.LOW),
    "soft hyphen": ("ig\xadnore", "ignore", "unicode.soft_hyphen", Severity.LOW),
    "operators": ("f\u2061(x)\u2062y", "f(x)y", "unicode.invisible_operator", Severity.LOW),
    "grapheme joiner": ("ig\u034fnore", "ignore", "unicode.format", Severity.LOW),
    "annotation": ("\ufff9a\ufffab\ufffb", "ab", "unicode.annotation", Severity.LOW),
    "deprecated": ("a\u206ab\u17b4", "ab", "unicode.format", Severity.LOW),
    "controls": ("a\x00b\x07c\x7f", "abc", "unicode.control", Severity.LOW),
    "C1 controls": ("a\x80b\x9bc", "abc", "unicode.control", Severity.LOW),
    "CSI": ("\x1b[1;31mred\x1b[0m", "red", "unicode.ansi", Severity.MEDIUM),
    "8-bit CSI": ("\x9b31mred", "red", "unicode.ansi", Severity.MEDIUM),
    "OSC": ("a\x1b]0;title\x07b\x1b]8;;http://x\x1b\\c", "abc", "unicode.ansi", Severity.MEDIUM),
    "8-bit OSC": ("a\x9d0;t\x9cb", "ab", "unicode.ansi", Severity.MEDIUM),
    "open OSC": ("a\x1b]0;title", "a]0;title", "unicode.control", Severity.LOW),
    "full width": ("ｉｇｎｏｒｅ　ａｌｌ", "ignore　all", "unicode.full_width", Severity.LOW),
    "mathematical": ("𝐢𝐠𝐧𝐨𝐫𝐞 𝐢𝐭", "ignore it", "unicode.styled", Severity.LOW),
    "circled": ("ⓘⓖⓝⓞⓡⓔ", "ignore", "unicode.styled", Severity.LOW),
    "raised": ("ⁱᵍⁿᵒʳᵉ", "ignore", "unicode.styled", Severity.LOW),
    "spread": ("𝓲 𝓰 𝓷 𝓸 𝓻 𝓮", "i g n o r e", "unicode.styled", Severity.LOW),
    "hidden in styled": ("𝐢\u200b𝐠\u200b𝐧𝐨", "igno", "unicode.styled", Severity.LOW),
    "flood": ("Z" + "\u0301" * 200, "Ź" + "\u0301" * 15, "unicode.combining_flood", Severity.MEDIUM),
    "surrogate": ("a\ud800b", "a\ufffdb", "unicode.surrogate", Severity.LOW),
    "noncharacter": ("a\uffffb", "a\ufffdb", "unicode.noncharacter", Severity.LOW),
    "syntax": ("<|im_start|>system", "< |im_start|>system", "syntax.chat_template", Severity.MEDIUM),
    "hidden syntax": ("<\u200b|im_\xadstart|>", "< |im_start|>", "syntax.chat_template", Severity.MEDIUM),
    "full-width syntax": ("＜|im_start|＞", "< |im_start|>", "syntax.chat_template", Severity.MEDIUM),
    "syntax with escapes": ("[\x1b[0mINST]", "[ INST]", "syntax.chat_template", Severity.MEDIUM),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_undone_and_flagged(name: str) -> None:
    text, expected, rule, severity = ATTACKS[name]
    normalized = normalize(text)
    assert normalized.text == expected
    assert severity <= max(
        finding.severity for finding in normalized.findings if finding.rule == rule
    )


@pytest.mark.parametrize(
    ("text", "is_hidden"),
    [
        *((text, True) for text in ("\u200b\u200d", "\U000e0041" * 9, "\ufe0f", "\u3164 \u2800", "\x1b[0m")),
        *((text, False) for text in ("", " ", "\n\t", "\r\n")),
    ],
)  # fmt: skip
def test_a_prompt_of_only_invisible_characters_is_named(text: str, is_hidden: bool) -> None:
    normalized = normalize(text)
    assert not normalized.text.strip()
    places = [(f.rule, f.start, f.end) for f in normalized.findings]
    assert (("unicode.invisible_only", 0, len(text)) in places) is is_hidden


def test_line_ends_become_newlines() -> None:
    assert normalize("a\r\nb\rc\x85d\u2028e\u2029f\x0bg\x0ch\n").text == "a\nb\nc\nd\ne\nf\ng\nh\n"
    assert normalize("a\r\nb\r\nc").original_span(2, 4) == (3, 6)


def test_findings_point_into_the_original() -> None:
    text = "é\r\n\x1b[1mab\u200bc 𝐢𝐠𝐧𝐨𝐫𝐞 \x1b[0m<|eot|>"
    places = {
        finding.rule: text[finding.start : finding.end] for finding in normalize(text).findings
    }
    assert places["unicode.zero_width"] == "\u200b"
    assert places["unicode.styled"] == "𝐢𝐠𝐧𝐨𝐫𝐞"
    assert places["syntax.chat_template"] == "<|eot|>"
    assert places["unicode.ansi"] == "\x1b[0m" or places["unicode.ansi"] == "\x1b[1m"


def test_what_was_removed_inside_a_span_belongs_to_it() -> None:
    text = "x ig\u200bno\u200bre\u200b y"
    normalized = normalize(text)
    start = normalized.text.index("ignore")
    first, last = normalized.original_span(start, start + 6)
    assert text[first:last] == "ig\u200bno\u200bre"


def test_a_mark_in_its_own_place_is_no_finding() -> None:
    assert normalize("\ufeffhello").text == "hello"
    assert not normalize("\ufeffhello").findings


def test_bytes_that_are_no_utf8_are_replaced_and_flagged() -> None:
    normalized = normalize(b"caf\xe9 \xed\xa0\x80 ok".decode("utf-8", "surrogateescape"))
    assert normalized.text == "caf\ufffd \ufffd\ufffd\ufffd ok"
    assert {finding.rule for finding in normalized.findings} == {"unicode.surrogate"}


@pytest.mark.parametrize("size", [1000, 2000])
@pytest.mark.parametrize(
    "unit",
    ["\u0301", "a\u0301\u0316", "\u200b", "a\u200b", "\ud800", "𝐚 ", "\x1b]", "<|a", "aо", "\u2066", "<s>", "[[["],
)  # fmt: skip
def test_hostile_texts_cost_in_proportion(
    unit: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    real = ucd.normalize

    def counted(form: str, text: str) -> str:
        nonlocal calls
        calls += len(text)
        return real(form, text)

    monkeypatch.setattr(ucd, "normalize", counted)
    text = unit * size
    normalized = normalize(text)
    assert calls <= 3 * len(text)
    assert len(normalized.findings) <= 3 * (FINDINGS_MAX + 2)
    assert len(Skeleton(normalized.text).text) <= 6 * len(normalized.text)


def test_ten_megabytes_of_marks_leave_almost_nothing() -> None:
    normalized = normalize("\u0301" * 5_000_000)
    assert len(normalized.text) <= 16
    assert [finding.rule for finding in normalized.findings] == ["unicode.combining_flood"]


def test_a_flood_hides_no_other_finding() -> None:
    text = "a\u200b" * 5000 + "\u05e9\u05dc\u200f \u202e\U000e0041"
    normalized = normalize(text)
    assert normalized.text.endswith("\u05e9\u05dc\u200f ")
    findings = {(finding.rule, finding.severity): finding for finding in normalized.findings}
    assert findings.keys() == {
        ("unicode.zero_width", Severity.LOW),
        ("unicode.bidi", Severity.MEDIUM),
        ("unicode.tag", Severity.HIGH),
    }
    assert findings["unicode.tag", Severity.HIGH].end == len(text)
    assert len(normalized.findings) <= FINDINGS_MAX + 3


def test_rest_finding_covers_later_steps() -> None:
    edited = EditedText("0123456789" * 11)
    for at in range(40, 40 + 2 * FINDINGS_MAX, 2):
        listed = edited.flag("unicode.format", at, at + 1, Severity.LOW)
    assert not listed
    edited.advance(edited.text)
    assert not edited.flag("unicode.format", 7, 9, Severity.LOW)
    findings = edited.findings
    assert len(findings) == FINDINGS_MAX + 1
    assert any(finding.start <= 7 and finding.end == 110 for finding in findings)
