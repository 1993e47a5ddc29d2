"""Offset maps: the way back over any list of edits."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.safety.text import ucd
from gateway.safety.text.edited_text import OffsetEdit, OffsetMap
from gateway.safety.text.normalize import composition_edits

EDITS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=12)


def placed(
    steps: list[tuple[int, int, int]],
) -> tuple[list[OffsetEdit], list[tuple[int, int]], int]:
    """Edits, the span that each character after them comes from, and the length before them."""
    edits, origins, at = [], [], 0
    for gap, removed, length in steps:
        origins += [(offset, offset + 1) for offset in range(at, at + gap)]
        edits.append(OffsetEdit(at + gap, at + gap + removed, length if removed else 0))
        origins += [(at + gap, at + gap + removed)] * (length if removed else 0)
        at += gap + removed
    return edits, [*origins, (at, at + 1)], at + 1


@given(EDITS)
def test_every_character_leads_back_to_its_origin(steps: list[tuple[int, int, int]]) -> None:
    edits, origins, _ = placed(steps)
    back = OffsetMap(edits)
    assert [back.span_before(at, at + 1) for at in range(len(origins))] == origins
    for start in range(len(origins)):
        assert back.span_before(start, len(origins)) == (origins[start][0], origins[-1][1])
        assert back.span_before(start, start) == (origins[start][0], origins[start][0])


def test_without_edits_offsets_stay() -> None:
    assert OffsetMap(()).span_before(3, 7) == (3, 7)


COMPOSING = st.sampled_from(
    "aeé각각\u0301\u0316\u0327\u0344\u0958\u093cÅ\u212b\ufa19か\u3099\U0001d160\U000110a5\U000110ba "
)


@given(st.text(COMPOSING, max_size=16))
def test_the_edits_of_composition_give_the_composed_text(text: str) -> None:
    parts, position = [], 0
    for edit in composition_edits(text):
        parts += [text[position : edit.start], ucd.normalize("NFC", text[edit.start : edit.end])]
        position = edit.end
    made = "".join([*parts, text[position:]])
    expected = "\ufa19".join(ucd.normalize("NFC", part) for part in text.split("\ufa19"))
    assert made == expected
