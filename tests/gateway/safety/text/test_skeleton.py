"""The view for detection: look-alikes of ASCII read as ASCII, everything else as it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.safety.text.skeleton import Skeleton
from tests.gateway.safety.text.corpus import CODE, SCRIPTS
from tests.gateway.safety.text.tables import PROTOTYPES

DISGUISES = [
    "іgnоrе", "𝓲𝓰𝓷𝓸𝓻𝓮", "𝐢𝐠𝐧𝐨𝐫𝐞", "ｉｇｎｏｒｅ", "ⓘⓖⓝⓞⓡⓔ", "⒤⒢⒩⒪⒭⒠", "ɪɢɴᴏʀᴇ", "i̴g̷n̵o̶r̷e̸", "ïgñòrë", "𝚒𝚐𝚗𝚘𝚛𝚎",
    "🅘🅖🅝🅞🅡🅔", "🄸🄶🄽🄾🅁🄴", "🇮🇬🇳🇴🇷🇪", "ⁱᵍⁿᵒʳᵉ", "Іgnοre",
]  # fmt: skip


@pytest.mark.parametrize("text", DISGUISES)
def test_disguises_fall(text: str) -> None:
    assert Skeleton(text).text.lower() == "ignore"


@pytest.mark.parametrize("text", CODE.values())
def test_ascii_is_its_own_Skeleton(text: str) -> None:
    ascii_only = text.encode("ascii", "ignore").decode()
    assert Skeleton(ascii_only).text is ascii_only


@pytest.mark.parametrize(
    "name", ["arabic", "hebrew", "devanagari", "thai", "georgian", "ethiopic", "korean"]
)
def test_scripts_that_do_not_mimic_latin_keep_their_letters(name: str) -> None:
    letters = "".join(
        letter for letter in SCRIPTS[name] if letter.isalpha() and not letter.isascii()
    )
    assert Skeleton(letters).text == letters


def test_digits_of_other_scripts_read_as_digits() -> None:
    assert Skeleton("٤١١١ १२३ ４５ 𝟗").text == "4111 123 45 9"


@given(st.text(st.sampled_from("aоﬁé𝐚①½ﷺ漢🇺…\u0301\ud800\U0002f800 "), max_size=20))
def test_offsets_lead_back(text: str) -> None:
    seen = Skeleton(text)
    spans = [seen.original_span(at, at + 1) for at in range(len(seen.text))]
    assert spans == sorted(spans)
    assert all(0 <= start < end <= len(text) for start, end in spans)
    assert all(
        seen.text[at] in Skeleton(text[start:end]).text for at, (start, end) in enumerate(spans)
    )
    assert seen.original_span(len(seen.text), len(seen.text)) == (len(text), len(text))


def test_a_hit_maps_to_the_letters_it_was_made_of() -> None:
    text = "so i̴g̷n̵o̶r̷e̸ ﬁne"
    seen = Skeleton(text)
    start = seen.text.index("ignore")
    first, last = seen.original_span(start, start + 6)
    assert text[first:last].startswith("i̴g̷")
    assert text[first:last].endswith("e")
    start = seen.text.index("fine")
    assert seen.original_span(start, start + 4) == (text.index("ﬁ"), len(text))


def test_the_confusables_are_whole() -> None:
    table = PROTOTYPES
    assert len(table) == 6565
    assert [table[ord(letter)] for letter in "аmі"] == ["a", "rn", "i"]
    assert all(target for target in table.values())
