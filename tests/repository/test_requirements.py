"""distributions/requirements/*.txt hold what pyproject.toml asks for: one version each, with hashes."""

import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.installed import ROOT, named

EXTRAS = {
    "process": ("gateway", "batcher", "jobs"),
    "worker": ("worker",),
    "mesh": ("mesh",),
    "dev": ("dev",),
}
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def locked(name: str) -> dict[str, set[str]]:
    """The versions by distribution; one that differs between Pythons comes twice."""
    text = (ROOT / "distributions/requirements" / f"{name}.txt").read_text(encoding="utf-8")
    found: dict[str, set[str]] = {}
    for entry in re.split(r"(?m)^(?=[a-z])", text):
        if entry:
            requirement = Requirement(entry.partition("\\")[0].strip())
            (pinned,) = requirement.specifier
            assert pinned.operator == "=="
            assert HASH.search(entry), entry
            found.setdefault(canonicalize_name(requirement.name), set()).add(pinned.version)
    return found


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_has_all_that_its_extras_ask_for(name: str) -> None:
    versions = locked(name)
    asked = [one for extra in EXTRAS[name] for one in named(extra) if one.name != "torch"]

    assert asked
    for requirement in asked:
        found = versions.get(canonicalize_name(requirement.name), set())
        wrong = f"{requirement}: {found or 'missing'}; run: scripts/lock"
        assert found, wrong
        assert all(requirement.specifier.contains(Version(one)) for one in found), wrong


@pytest.mark.parametrize("name", EXTRAS)
def test_a_host_takes_the_torch_that_fits_it(name: str) -> None:
    assert not {"torch", "triton", "cuda-toolkit", "nvidia-cublas"} & locked(name).keys()


@pytest.mark.parametrize("name", ["process", "worker", "mesh"])
def test_what_runs_is_what_was_tested(name: str) -> None:
    tested = locked("dev")
    assert {
        one: versions for one, versions in locked(name).items() if tested[one] != versions
    } == {}
