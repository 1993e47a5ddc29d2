"""The Dockerfile copies what exists."""

import fnmatch
import re
from pathlib import PurePosixPath

from tests.support.compose import FOLDER, ROOT

INSTRUCTIONS = re.sub(
    r"\\\n", " ", (FOLDER / "Dockerfile").read_text(encoding="utf-8")
).splitlines()


def in_build_context(path: str) -> bool:
    lines = (FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    kept = [line.removeprefix("!") for line in lines if line.startswith("!")]
    # What lies in a folder that is kept is kept too.
    names = [path, *(parent.as_posix() for parent in PurePosixPath(path).parents)]
    return any(fnmatch.fnmatch(name, pattern) for name in names for pattern in kept)


def test_copied_paths_exist_and_are_in_the_build_context() -> None:
    copies = [line.split()[1:-1] for line in INSTRUCTIONS if line.startswith("COPY ")]
    sources = [word for words in copies for word in words if not word.startswith("--")]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert in_build_context(source), source
