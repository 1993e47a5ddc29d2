"""Origins of characters: the way back over any list of edits."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.safety.text import ucd
from gateway.safety.text.edited_text import EditedText
from gateway.safety.text.normalize import normalize

EDITS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(0, 3)), max_size=12)


@given(EDITS)
def test_every_character_leads_back_to_its_origin(steps: list[tuple[int, int, int]]) -> None:
    edits, origins, at = [], [], 0
    for gap, removed, length in steps:
        origins += [(offset, offset + 1) for offset in range(at, at + gap)]
        origins += [(at + gap, at + gap + removed)] * length
        edits.append((at + gap, at + gap + removed, "x" * length))
        at += gap + removed
    origins.append((at, at + 1))
    edited = EditedText("-" * (at + 1))
    edited.replace(edits)
    size = len(edited.text)
    assert [edited.original_span(at, at + 1) for at in range(size)] == origins
    for start in range(size):
        assert edited.original_span(start, size) == (origins[start][0], origins[-1][1])
        assert edited.original_span(start, start) == (origins[start][0], origins[start][0])


COMPOSING = st.sampled_from(
    "aeé각각\u0301\u0316\u0327\u0344\u0958\u093cÅ\u212b\ufa19か\u3099\U0001d160\U000110a5\U000110ba "
)


@given(st.text(COMPOSING, max_size=16))
def test_text_is_composed_but_for_compatibility_ideographs(text: str) -> None:
    parts = normalize(text).text.split("\ufa19")
    assert parts == [ucd.normalize("NFC", part) for part in text.split("\ufa19")]
