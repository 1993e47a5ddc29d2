"""`scripts/containers`: images are built, and a stream survives the kill of a container, open and encrypted."""

import os
import re
import shutil
import subprocess

import pytest

from sluice.startup import free_port
from tests.support.compose import ROOT

TOOLS = ("podman", "buildah", "runc", "mmdebstrap")


@pytest.mark.long
@pytest.mark.containers
@pytest.mark.timeout(2700)
def test_stream_survives_the_kill_of_a_container() -> None:
    missing = [name for name in TOOLS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(TOOLS)}; missing: {', '.join(missing) or 'root'}")
    pytest.importorskip("podman_compose")
    ports = {"GATEWAY_PUBLISHED": str(free_port()), "HTTP_PUBLISHED": str(free_port())}
    ran = subprocess.run(
        [ROOT / "scripts/containers"],
        env={**os.environ, **ports},
        capture_output=True,
        text=True,
        timeout=2600,
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    said = ran.stdout
    assert said.count("is the same beside a kill") == 2
    for name in ("triton", "batcher", "jobs", "gateway"):
        confined = f"{name} runs as user 10001 on a read-only root without capabilities"
        assert said.count(confined) == 2
    assert "UNAUTHENTICATED" in said
    size = re.search(r"^sluice-process +(\d+) MB$", said, re.MULTILINE)
    assert size is not None
    assert int(size[1]) < 400
