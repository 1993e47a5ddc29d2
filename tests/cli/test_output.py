"""Text for people and programs."""

import io

import pytest

from cli import output


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_answer_cannot_steer_a_terminal() -> None:
    terminal = FakeTerminal()
    output.write_text("a\x1b[2Jb\r\n\tc\x9b", terminal)
    assert terminal.getvalue() == "a\N{REPLACEMENT CHARACTER}[2Jb\N{REPLACEMENT CHARACTER}\n\tc" + (
        "\N{REPLACEMENT CHARACTER}"
    )


def test_answer_goes_to_a_pipe_as_it_is() -> None:
    pipe = io.StringIO()
    output.write_text("a\x1b[2J", pipe)
    assert pipe.getvalue() == "a\x1b[2J"


def test_numbers_of_a_table_are_aligned_to_the_right() -> None:
    assert output.aligned(("name", "n"), [("abcde", 10), ("b", None)]) == [
        "name    n",
        "abcde  10",
        "b       -",
    ]


def test_notes_are_for_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    output.note("remark")
    assert capsys.readouterr() == ("", "")
