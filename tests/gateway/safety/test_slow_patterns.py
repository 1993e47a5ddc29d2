"""Patterns of rules that engines' trackers call slow are refused by name, or are ready within limits of a process."""

import json
import subprocess
import sys

import pytest

from tests.sluice.slow_constraints import PATTERNS

CPU_S = 60
MEMORY_BYTES = 512 << 20
PROGRAM = """
import json, resource, sys
from gateway.safety.loading import problems_of
from gateway.safety.settings import RuleSettings

def said(pattern):
    rule = RuleSettings(name="x", pattern=pattern, must_match=("zzz",))
    return [why for key, why in problems_of(rule) if key == ("pattern",)]

said("warm up")
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
cpu_s, memory = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
print(json.dumps({name: said(one) for name, one in json.load(sys.stdin).items()}))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    """What is wrong with each pattern, all of them in one process with limits."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(CPU_S), str(MEMORY_BYTES)],
        input=json.dumps({name: pattern for name, (pattern, _) in PATTERNS.items()}),
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, list[str]] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_taken_or_refused_with_the_reason(
    said: dict[str, list[str]], name: str
) -> None:
    problems, expected = said[name], PATTERNS[name][1]
    assert len(problems) == bool(expected), problems
    assert all(expected in problem for problem in problems)
