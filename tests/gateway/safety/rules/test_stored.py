"""Compiled patterns are kept on disk, and whatever is wrong there they are compiled."""

import os
import stat
from pathlib import Path

import hyperscan
import pytest

from gateway.safety.rules import stored
from gateway.safety.rules.ruleset import Prefilter
from gateway.safety.rules.stored import FILES_MAX, folder

PATTERNS = ("ab+c", r"\d{4}")
TEXT = b"x abbc 1234"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return folder()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each set of patterns that is compiled."""
    made: list[int] = []
    compiled = stored.compiled

    def counting(patterns: list[str]) -> hyperscan.Database:
        made.append(len(patterns))
        return compiled(patterns)

    monkeypatch.setattr(stored, "compiled", counting)
    return made


def files(cache: Path) -> list[Path]:
    return list(cache.iterdir())


def test_patterns_are_compiled_once(cache: Path, compilations: list[int]) -> None:
    found = [Prefilter(PATTERNS).present(TEXT) for _ in range(3)]
    assert found == [{0: 6, 1: 11}] * 3
    assert compilations == [2]
    assert Prefilter((*PATTERNS, "x")).present(TEXT) == {0: 6, 1: 11, 2: 1}
    assert compilations == [2, 3]
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in files(cache)} == {0o600}


@pytest.mark.parametrize("cut", [0, 10, 100, -1])
def test_a_file_that_is_cut_short_is_replaced(
    cache: Path, compilations: list[int], cut: int
) -> None:
    Prefilter(PATTERNS)
    (file,) = files(cache)
    whole = file.read_bytes()
    file.write_bytes(whole[:cut])
    assert Prefilter(PATTERNS).present(TEXT) == {0: 6, 1: 11}
    assert compilations == [2, 2]
    assert len(file.read_bytes()) == len(whole)


def test_a_file_with_any_damaged_byte_is_replaced(cache: Path, compilations: list[int]) -> None:
    Prefilter(PATTERNS)
    (file,) = files(cache)
    whole = file.read_bytes()
    places = [*range(0, 64, 4), *range(64, len(whole), len(whole) // 50)]
    for at in places:
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        assert Prefilter(PATTERNS).present(TEXT) == {0: 6, 1: 11}
    assert len(compilations) > len(places) / 2  # some bytes of the header mean nothing


def test_a_folder_that_cannot_be_written_changes_nothing(
    cache: Path, compilations: list[int], tmp_path: Path
) -> None:
    (tmp_path / "sluice").write_text("a file in its place")
    for _ in range(2):
        assert Prefilter(PATTERNS).present(TEXT) == {0: 6, 1: 11}
    assert compilations == [2, 2]


def test_a_folder_of_another_user_is_not_used(
    cache: Path, compilations: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    Prefilter(PATTERNS)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert Prefilter(PATTERNS).present(TEXT) == {0: 6, 1: 11}
    assert compilations == [2, 2]


def test_a_folder_that_others_could_write_is_closed(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    Prefilter(PATTERNS)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_old_files_go(cache: Path, compilations: list[int]) -> None:
    for number in range(FILES_MAX + 3):
        Prefilter((f"number {number} of many",))
        Prefilter(("number 0 of many",))  # the first stays in use
    assert len(files(cache)) == FILES_MAX
    before = len(compilations)
    Prefilter(("number 0 of many",))
    assert len(compilations) == before
