"""Files that commands write: what is under their name meanwhile, and what is left of a command that ends early."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from cli.failure import CommandFailed
from cli.files import NewFile

_HANGING = """
import sys, signal, pathlib
from cli.files import NewFile
with NewFile(pathlib.Path(sys.argv[1])) as file:
    file.write("x")
    print("written", flush=True)
    signal.pause()
"""


def write(path: Path, text: str) -> None:
    with NewFile(path) as new:
        new.write(text)
        new.complete()


def test_two_commands_may_write_the_same_file(tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    with NewFile(out) as first:
        with NewFile(out) as second:
            second.write("second")
            second.complete()
        first.write("first")
        first.complete()
    assert out.read_text() == "first"
    assert list(tmp_path.iterdir()) == [out]


def test_new_file_replaces_what_a_link_names(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link, real = tmp_path / "link.txt", tmp_path / "elsewhere" / "real.txt"
    link.symlink_to(Path("elsewhere") / "real.txt")
    for text in ("of a new file", "of a second one"):  # the link dangles at first
        write(link, text)
        assert link.is_symlink()
        assert real.read_text() == text
    assert list(real.parent.iterdir()) == [real]


def test_new_file_writes_through_a_pipe(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write(pipe, "through")
    reader.join(10)
    assert read == ["through"]
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_new_file_keeps_a_device(tmp_path: Path) -> None:
    null, link = tmp_path / "null", tmp_path / "link"
    os.mknod(null, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    link.symlink_to(null)
    for path in (null, link):
        write(path, "dropped")
        assert stat.S_ISCHR(null.lstat().st_mode)
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, null]


def test_new_file_appends_to_an_open_descriptor(tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    out.write_text("before\n")
    with out.open("a") as file:
        write(Path(f"/dev/fd/{file.fileno()}"), "after\n")
    assert out.read_text() == "before\nafter\n"


def test_new_file_in_dev_shm_is_a_file() -> None:
    path = Path(f"/dev/shm/sluice-test-{os.getpid()}")
    try:
        write(path, "a file")
        assert path.read_text() == "a file"
    finally:
        path.unlink(missing_ok=True)


def test_new_file_does_not_make_devices() -> None:
    with pytest.raises(CommandFailed, match="No such file"):
        NewFile(Path("/dev/sluice-none"))


def test_new_file_keeps_permissions(tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    out.touch(mode=0o600)
    write(out, "secret")
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_command_leaves_no_file(tmp_path: Path, sent: signal.Signals) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("older")
    with subprocess.Popen(
        [sys.executable, "-c", _HANGING, str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == b"written\n"
        command.send_signal(sent)
    assert command.returncode != 0
    if sent == signal.SIGINT:
        assert list(tmp_path.iterdir()) == [out]
    assert out.read_text() == "older"
