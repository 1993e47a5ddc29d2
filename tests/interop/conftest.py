"""What the foreign clients talk to."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from sluice import errors
from sluice.v1 import inference_pb2 as pb
from tests.support.scripted import Fail, ScriptedService, Step, delta, finished, started

ANSWER: list[Step] = [started(), delta(0, "3, 7"), delta(4, ", 12"), finished(8)]


class ServiceWithModels(ScriptedService):
    """Knows the models "small" and "large", as the shipped mesh does."""

    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        """The script, or the typed error for a model that is not known."""
        if request.model not in ("", "auto", "small", "large"):
            error = errors.UnknownModel(f"no model {request.model!r}; known: small, large")
            self._scripts = [[Fail(error)]]
        async for response in super().Generate(request, context):
            yield response


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """Where the mesh's API is served, with reflection."""
    async with ServiceWithModels.serve([ANSWER]) as service:
        yield service.address
