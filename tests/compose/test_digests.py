"""scripts/digests: images of compose by digest, where a registry answers; else nothing is changed."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "digests"
DIGEST = "sha256:" + "ab" * 32
TEXT = f"# images\nNATS_IMAGE=nats:2.15\nJAEGER_IMAGE=jaeger:2@sha256:{'0' * 64}\nNATS_PORT=4222\n"


def run(tmp_path: Path, answer: str) -> tuple[subprocess.CompletedProcess[str], str]:
    docker, file = tmp_path / "docker", tmp_path / ".env"
    docker.write_text(f"#!/bin/sh\n{answer}\n")
    docker.chmod(0o755)
    file.write_text(TEXT)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [str(SCRIPT), str(file)], env=environment, capture_output=True, text=True, check=False
    )
    return done, file.read_text()


def test_digests_are_written_behind_the_tags(tmp_path: Path) -> None:
    done, text = run(tmp_path, f"echo {DIGEST}")
    assert done.returncode == 0, done.stderr
    assert text == (
        f"# images\nNATS_IMAGE=nats:2.15@{DIGEST}\nJAEGER_IMAGE=jaeger:2@{DIGEST}\nNATS_PORT=4222\n"
    )


@pytest.mark.parametrize("answer", ["exit 1", "echo nonsense"])
def test_without_a_registry_nothing_is_changed(tmp_path: Path, answer: str) -> None:
    done, text = run(tmp_path, answer)
    assert done.returncode == 1
    assert "is unchanged" in done.stderr
    assert text == TEXT
