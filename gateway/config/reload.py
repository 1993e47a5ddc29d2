"""Reloads safety and routing policies while the gateway runs; requests in flight keep those they began with."""

import asyncio
import logging
from pathlib import Path
from typing import Final

from gateway.config.policies import load_policies_of
from gateway.config.routers import load_router
from gateway.models.catalog import Catalog
from gateway.safety.inspector import Inspector
from gateway.server import Gateway
from sluice.settings import Settings
from sluice.settings.reload import TAKEN_WHILE_RUNNING, refuse_changes

log = logging.getLogger(__name__)

_OF_OTHERS: Final = frozenset({"batcher", "tenants", "triton"})
"""Sections that a gateway does not use."""
_FIXED: Final = [
    name
    for name in Settings.model_fields
    if name not in TAKEN_WHILE_RUNNING["gateway"] | _OF_OTHERS
]


class GatewayReload:
    """`sluice.settings.reload.Apply` of a gateway."""

    def __init__(
        self,
        settings: Settings,
        path: Path,
        inspector: Inspector,
        catalog: Catalog,
        gateway: Gateway,
    ) -> None:
        """``settings`` are in force; ``path`` is where they came from."""
        self._settings = settings
        self._path = path
        self._inspector = inspector
        self._catalog = catalog
        self._gateway = gateway

    async def __call__(self, settings: Settings) -> None:
        """Loads and compiles in a thread, then replaces all policies at once.

        Raises:
            SettingsError: they are not valid, or something else has changed; the old ones stay in use.
        """
        refuse_changes(self._settings, settings, _FIXED)
        router = await asyncio.to_thread(load_router, settings, self._catalog.facts)
        compiled = await asyncio.to_thread(load_policies_of, settings, self._path)
        tried = self._inspector.dry_run
        await self._gateway.use_routing(router, settings.routing)
        self._inspector.swap(compiled)
        self._settings = settings
        if tried is not None and tried is not self._inspector.dry_run:
            log.info("%s", tried)
