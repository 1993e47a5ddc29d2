"""Hidden text: tags and bytes in variation selectors are read."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.safety.text.invisible import smuggled
from gateway.safety.text.normalize import normalize


def tagged(text: str) -> str:
    return "".join(chr(0xE0000 + ord(letter)) for letter in text)


def selected(data: bytes) -> str:
    return "".join(chr(0xFE00 + byte if byte < 16 else 0xE0100 + byte - 16) for byte in data)


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1))
def test_tags_are_read_and_do_not_reach_the_model(hidden: str) -> None:
    text = f"hello{tagged(hidden)} world"
    assert smuggled(text) == [(5, 5 + len(hidden), hidden)]
    assert normalize(text).text == "hello world"


@given(st.text(st.characters(codec="utf-8"), min_size=4))
def test_selectors_are_read_and_do_not_reach_the_model(hidden: str) -> None:
    text = f"😀{selected(hidden.encode())}!"
    assert [found for _, _, found in smuggled(text)] == [hidden]
    assert len(normalize(text).text) <= 3


def test_nothing_is_hidden_in_ordinary_text() -> None:
    assert smuggled("plain") == []
    assert smuggled("❤️ 葛\U000e0100 میخواهم") == []
    assert [found for _, _, found in smuggled("🏴󠁧󠁢󠁥󠁮󠁧󠁿")] == ["gbeng"]
