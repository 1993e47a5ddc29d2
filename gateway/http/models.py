"""/v1/models and /health."""

from collections.abc import Callable
from typing import Any

from gateway.admission.load_table import ModelLoadTable
from gateway.http.answers import encode
from gateway.http.call import HttpCall
from gateway.models.catalog import Catalog
from sluice.defaults import AUTO
from sluice.errors import UnknownModel


class Models:
    """What can be named in a request, "auto" first."""

    def __init__(
        self, catalog: Catalog, loads: ModelLoadTable, created: int, now: Callable[[], float]
    ) -> None:
        """``created``: when the gateway started, seconds since 1970; ``now``: the clock of ``loads``."""
        self._catalog = catalog
        self._loads = loads
        self._created = created
        self._now = now

    async def list(self, call: HttpCall) -> None:
        """All of them."""
        models = [self._model(name) for name in (AUTO, *self._catalog.callable)]
        await call.answer(200, encode({"object": "list", "data": models}))

    async def get(self, call: HttpCall) -> None:
        """One of them.

        Raises:
            UnknownModel: there is none of that name.
        """
        name, known = call.path["name"], (AUTO, *self._catalog.callable)
        if name not in known:
            raise UnknownModel(f"there is no model of that name; known: {', '.join(known)}")
        await call.answer(200, encode(self._model(name)))

    def _model(self, name: str) -> dict[str, Any]:
        named = {"id": name, "object": "model", "created": self._created, "owned_by": "sluice"}
        if name == AUTO:
            return named
        model = self._catalog[name]
        ready = self._loads.load(name, self._now()).ready
        facts = {"tier": model.settings.tier, "max_model_len": model.context_tokens}
        return {**named, **facts, "ready": ready}
