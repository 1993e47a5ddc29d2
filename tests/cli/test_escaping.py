"""Text of others in the output of commands: it cannot steer the terminal, and JSON keeps its meaning."""

import json
from collections.abc import Callable

import pytest

from cli import batch_view, failure, output
from cli.escaping import printable
from sluice.v1 import jobs_pb2 as pb

ATTACKS = (
    "\x1b[2J\x1b[31mclear",
    "\x1b]0;title\x07",
    "\x1b]52;c;cm0gLXJm\x1b\\\\",
    "\x9b2J of C1",
    "\x9d0;title\x9c",
    "\u202egpj.exe",
    "\u2066isolate\u2069",
    "back\rover",
    "bell\x07 back\x08 delete\x7f",
    "line\u2028end",
)


def is_safe(text: str) -> bool:
    return all(
        char == "\n" or (char.isprintable() and not 0x200E <= ord(char) <= 0x2069) for char in text
    )


@pytest.mark.parametrize("attack", ATTACKS)
def test_printable_leaves_nothing_that_steers(attack: str) -> None:
    assert is_safe(printable(attack))
    assert printable("Zoë 日本 👩‍🔬 שלום\t\n") == "Zoë 日本 👩‍🔬 שלום\t\n"


@pytest.mark.parametrize("attack", ATTACKS)
def test_jobs_of_others_are_escaped(attack: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = pb.Job(id="job-1", state=pb.JOB_STATE_FAILED, reason=attack, reason_code=attack)
    job.spec.name = attack
    job.progress.stages.add(name=attack)
    output.show({}, "\n".join(output.tree(batch_view.job_object(job))))
    batch_view.write_list([job])
    output.write_json(batch_view.job_object(job))
    written = capsys.readouterr().out
    assert is_safe(written)
    assert json.loads(written.splitlines()[-1])["name"] == attack


def test_cells_of_a_table_are_one_line() -> None:
    lines = output.aligned(("name", "state"), [("two\nlines", "done")])
    assert lines[1] == "two\\nlines  done"


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("write", [output.show, output.write_line])
def test_text_for_people_is_escaped(
    attack: str, write: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    write(attack) if write is output.write_line else write({}, attack)
    assert is_safe(capsys.readouterr().out)


@pytest.mark.parametrize("attack", ATTACKS)
def test_errors_are_escaped(attack: str, capsys: pytest.CaptureFixture[str]) -> None:
    failure.report(failure.CommandFailed("FAILED", f"no model {attack}"), as_json=False)
    assert is_safe(capsys.readouterr().err)
