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


def test_a_wide_table_is_printed_in_parts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    headers = ("policy", "class", "arrived", "finished", "expired")
    output.write_table(headers, [("length", "bulk", 10, 20, 30)], keys=2)
    assert capsys.readouterr().out.splitlines() == [
        "policy  class  arrived",
        "length  bulk        10",
        "",
        "policy  class  finished",
        "length  bulk         20",
        "",
        "policy  class  expired",
        "length  bulk        30",
    ]
    output.write_table(headers, [("length", "bulk", 10, 20, 30)])
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    terminal = FakeTerminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    output.write_styled("x", fg="red")
    monkeypatch.setenv(name, value)
    output.write_styled("x", fg="red")
    assert terminal.getvalue() == "\x1b[31mx\x1b[0m\nx\n"


def test_a_tree_has_a_line_for_each_value_that_is_set() -> None:
    described = {"a": 1, "b": {"c": "x\ny", "d": 0}, "e": [{"f": 0.123456}, {"f": 2}], "g": None}
    lines = ["a 1", "b", "  c x\\ny", "e", "  f 0.1235", "e", "  f 2"]
    assert list(output.tree(described)) == lines
