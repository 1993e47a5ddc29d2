"""Each process of pytest-xdist compiles a part of the test files for all: else, in a new clone, each compiles all."""

import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def compile_share(config: pytest.Config, tests: Path) -> None:
    """Does, for a part of the files, what pytest does for each when it imports it; it finds them in its cache."""
    worker = getattr(config, "workerinput", None)
    state = config.stash.get(rewrite.assertstate_key, None)
    whole = [config.rootpath / argument for argument in config.args] == [tests]
    if worker is None or state is None or sys.dont_write_bytecode or not whole:
        return
    number = int(worker["workerid"].removeprefix("gw"))
    for file in sorted(tests.rglob("test_*.py"))[number :: worker["workercount"]]:
        cache = rewrite.get_cache_dir(file)
        pyc = cache / (file.stem + rewrite.PYC_TAIL)
        if rewrite.try_makedirs(cache) and rewrite._read_pyc(file, pyc) is None:
            source_hash, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(state, code, source_hash, pyc)
