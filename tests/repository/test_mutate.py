"""scripts/mutate draws the same faults for a seed, and runs the tests near each of them."""

import pytest

pytest.importorskip("cosmic_ray", reason="scripts/mutate installs cosmic-ray")

from tests.mutation import ROOT, draw, folder_of_tests, near_tests


def test_a_draw_is_the_same_for_a_seed() -> None:
    drawn = [draw(ROOT, ["jobs/core/"], 4, seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 4


def test_tests_near_import_the_module() -> None:
    assert "tests/jobs/core/test_leases.py" in near_tests(ROOT, "jobs/core/leases.py")
    assert folder_of_tests(ROOT, "jobs/core/leases.py") == "tests/jobs/core"
    assert folder_of_tests(ROOT, "gateway/server.py") == "tests/gateway"
