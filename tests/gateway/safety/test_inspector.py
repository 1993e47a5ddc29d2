"""Line ends and control characters."""

import hypothesis.strategies as st
from hypothesis import given

from gateway.safety.inspector import ControlInspector, Finding

INSPECTOR = ControlInspector()


def test_line_ends_are_made_normal() -> None:
    inspected = INSPECTOR.inspect("a\r\nb\rc\n")
    assert inspected.text == "a\nb\nc\n"
    assert not inspected.findings


def test_control_characters_go_with_a_finding() -> None:
    inspected = INSPECTOR.inspect("a\x00b\x1bc\td\n\x7f")
    assert inspected.text == "abc\td\n"
    assert list(inspected.findings) == [Finding("control_characters", 3)]


@given(st.text())
def test_inspection_changes_nothing_twice(text: str) -> None:
    once = INSPECTOR.inspect(text)
    assert INSPECTOR.inspect(once.text).text == once.text
    assert not INSPECTOR.inspect(once.text).findings
