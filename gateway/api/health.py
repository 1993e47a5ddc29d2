"""Readiness over ``grpc.health.v1``, of the service and of every model (docs/internals/wire.md, Readiness).

The service is ready while it can answer something: a guard, a classifier or one of several models that is missing fails
the requests that need it, and they alone. ``tasks.<name>`` is SERVING while requests may send tasks to that version of
a model, for who ends the workers of one that was replaced.
"""

from collections.abc import Callable, Iterable
from typing import Final

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

from gateway.admission.load_table import ModelLoadTable
from gateway.models.catalog import Catalog
from gateway.upstream.nats_transport import NatsTransport

SERVICE: Final = "sluice.v1.InferenceService"
_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING


class GatewayHealth:
    """Keeps the statuses of the health service up to date."""

    def __init__(
        self,
        loads: ModelLoadTable,
        catalog: Catalog,
        transport: NatsTransport,
        tasks: Callable[[float], Iterable[str]],
    ) -> None:
        """``tasks``: task names of the models in use."""
        self.servicer = health_aio.HealthServicer()
        self._loads = loads
        self._catalog = catalog
        self._transport = transport
        self._tasks = tasks
        self._statuses: dict[str, bool] = {}
        self._leaving = False

    @property
    def serving(self) -> bool:
        """Whether the gateway can answer something."""
        return self._statuses.get(SERVICE, False) and not self._leaving

    async def refresh(self, now: float) -> None:
        """Sets the statuses that have changed."""
        connected = self._transport.connected
        ready = {
            model: connected and self._loads.load(model, now).ready for model in self._catalog.names
        }
        answers = any(ready[model] for model in self._catalog.callable)
        models = {f"model.{model}": is_ready for model, is_ready in ready.items()}
        whole = {SERVICE: answers, "": answers}
        tasks = {f"tasks.{name}": True for name in self._tasks(now)}
        gone = dict.fromkeys(self._statuses, False)
        for service, serving in {**gone, **models, **tasks, **whole}.items():
            if self._statuses.get(service) != serving:
                self._statuses[service] = serving
                await self.servicer.set(service, _SERVING if serving else _NOT_SERVING)

    async def leave(self) -> None:
        """Sets every status to NOT_SERVING, for good."""
        self._leaving = True
        await self.servicer.enter_graceful_shutdown()
