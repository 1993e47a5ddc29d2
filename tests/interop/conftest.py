"""What the foreign clients talk to."""

import pytest

from tests.support.mesh import RunningMesh


@pytest.fixture
def address(mesh: RunningMesh) -> str:
    """Where the suite's mesh serves its API, with reflection."""
    return mesh.address
