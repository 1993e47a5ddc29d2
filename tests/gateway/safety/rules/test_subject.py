"""Characters and bytes of a text."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.safety.rules.ruleset import Subject

ANY = st.text(alphabet=st.characters(), max_size=3000)


@given(ANY, st.integers(0, 3000))
def test_offsets_agree_with_python(text: str, at: int) -> None:
    subject = Subject(text)
    at = min(at, len(text))
    offset = len(subject.text[:at].encode("utf-8", "replace"))
    assert len(subject.text) == len(text)
    assert subject.chars(offset) == at
    assert subject.bytes_at(at) == offset


def test_digits_and_dashes_are_folded_in_place() -> None:
    subject = Subject("é ٣३𝟗 a\u2013b\u2212c ² 四")
    assert subject.text == "é 339 a-b-c ² 四"
    assert Subject("\ud800x").data == b"?x"
