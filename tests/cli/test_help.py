"""The command line itself: its help, mistyped commands, and how errors are shown."""

import json
import os
import pty
import subprocess
import sys

import pytest

from cli.main import COMMANDS, SECTIONS
from tests.cli.commands import BOUND_S, COMMAND, Cli


def on_terminal(*words: str, out_only: bool = False, **environment: str) -> tuple[int, str]:
    """Run the command with a terminal as its output (stderr apart if ``out_only``)."""
    main, side = pty.openpty()
    ran = subprocess.Popen(
        [*COMMAND, *words],
        stdin=subprocess.DEVNULL,
        stdout=side,
        stderr=subprocess.DEVNULL if out_only else side,
        env={**os.environ, "TERM": "xterm", "SLUICE_ADDRESS": "127.0.0.1:1", **environment},
    )
    os.close(side)
    shown = b""
    try:
        while part := os.read(main, 65536):
            shown += part
    except OSError:  # the other end is closed
        pass
    os.close(main)
    return ran.wait(BOUND_S), shown.decode().replace("\r\n", "\n")


async def test_help_names_each_command_once(cli: Cli) -> None:
    ran = await cli("--help")
    assert ran.code == 0
    listed = [line.split()[0] for line in ran.out.splitlines() if line.startswith("  ")]
    for name in COMMANDS:
        assert listed.count(name) == 1, name
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(COMMANDS)


@pytest.mark.parametrize("words", [("--help",), ("keys", "--help")])
async def test_help_is_the_same_on_a_terminal(cli: Cli, words: tuple[str, ...]) -> None:
    code, shown = on_terminal(*words)
    assert code == 0
    assert "\x1b" not in shown
    assert shown.split() == (await cli(*words)).out.split()


async def test_help_as_a_word(cli: Cli) -> None:
    assert (await cli("help", "keys")).out == (await cli("keys", "--help")).out
    assert (await cli("help")).out == (await cli()).out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("genrate", "x"), "No such command 'genrate'. Did you mean 'generate'?"),
        (("keys", "creat", "x"), "No such command 'creat'. Did you mean 'create'?"),
        (("batch", "reslts"), "No such command 'reslts'. Did you mean 'results'?"),
        (("xyzzy",), "No such command 'xyzzy'; see: sluice --help"),
        (("generate",), "Missing argument 'PROMPT'; see: sluice generate --help"),
        (
            ("models", "--jsn"),
            "No such option: --jsn (Possible options: --json); see: sluice models --help",
        ),
    ],
)
async def test_a_wrong_command_line_says_what_was_meant(
    cli: Cli, words: tuple[str, ...], says: str
) -> None:
    ran = await cli(*words)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == f"sluice: USAGE: {says}\n"


@pytest.mark.parametrize("group", ["batch", "certs", "keys", "router", "safety", "tenants"])
async def test_a_group_alone_shows_its_help(cli: Cli, group: str) -> None:
    ran = await cli(group)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"Usage: sluice {group} ")
    says = f"sluice: USAGE: name one of the commands; see: sluice {group} --help\n"
    assert ran.err.endswith(says)


def test_a_json_error_is_shown_once_on_a_terminal() -> None:
    code, shown = on_terminal("models", "--json")
    assert code == 1
    assert json.loads(shown)["error"]["reason"] == "TRANSPORT_UNAVAILABLE"
    piped = subprocess.run(
        [*COMMAND, "models", "--json", "--address", "127.0.0.1:1"], capture_output=True, text=True
    )
    assert json.loads(piped.stdout)["error"]["reason"] == "TRANSPORT_UNAVAILABLE"
    assert piped.stderr.startswith("sluice: TRANSPORT_UNAVAILABLE: ")


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error_of_their_own(closed: str) -> None:
    line = f"{sys.executable} -m cli models --address 127.0.0.1:1 {closed}"
    ran = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=BOUND_S)
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    assert "INTERNAL" not in ran.stderr


@pytest.mark.parametrize("answer", [b"", b"no\n"])
async def test_a_declined_question_says_how_to_go_on(cli: Cli, answer: bytes) -> None:
    ran = await cli("tenants", "forget", "acme", "--address", "127.0.0.1:1", stdin=answer)
    assert (ran.code, ran.out) == (1, "")
    last = ran.err.splitlines()[-1]
    assert last == "sluice: CANCELLED: aborted; use --yes to go on without the question"
