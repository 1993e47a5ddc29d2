"""Find the gateway that a command calls: the one that is named, else that of the mesh on this machine."""

import os
import re
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sluice.client import RetryPolicy
from sluice.client.channel import ADDRESS_VARIABLE, API_KEY_VARIABLE, CA_VARIABLE
from sluice.defaults import DEFAULT_ADDRESS
from sluice.errors import SetupError
from sluice.local_mesh import LocalMesh, find_mesh, state_root

FEW_TRIES: Final = RetryPolicy(start_tries=3, start_s=1.0)
"""Whoever is at a terminal hears within a second that no gateway answers."""
RESTARTING: Final = RetryPolicy(start_tries=5, start_s=3.0)
"""Of a mesh that runs on this machine: its supervisor starts a gateway that ended again."""
_REFUSED: Final = re.compile(
    r"^(?:failed to connect to all addresses|connections to all backends failing); .*?"
    r"Failed to connect to remote host: (?P<cause>.+)$",
    re.DOTALL,
)
"""How gRPC describes that no connection came about."""


@dataclass(frozen=True)
class GatewayTarget:
    """A gateway, or several.

    Attributes:
        address: HOST:PORT, or several with commas between them.
        is_named: whether the caller named it.
        mesh: the mesh of the state directory, where it runs; its gateway is the target unless another one is named.
        state_dir: where a mesh was looked for; None: this user has no such directory.
    """

    address: str
    is_named: bool
    mesh: LocalMesh | None
    state_dir: Path | None

    def options(self, tenant: str | None = None) -> dict[str, Any]:
        """Return the arguments of a client that calls it."""
        arguments: dict[str, Any] = {"address": self.address, "retry": FEW_TRIES, "tenant": tenant}
        if self.mesh is not None and not self.is_named:
            arguments["retry"] = RESTARTING
            # What the caller exports comes first.
            if not os.environ.get(CA_VARIABLE):
                arguments["ca"] = self.mesh.ca
            if not os.environ.get(API_KEY_VARIABLE):
                arguments["api_key"] = self.mesh.api_key
        return arguments

    def unreachable(self, message: str) -> str:
        """Say that it does not answer, and what to do; `message` is the client's."""
        refused = _REFUSED.match(message)
        cause = f"cannot connect to {self.address}: {refused['cause']}" if refused else message
        where = "" if refused else f" (gateway {self.address})"
        return f"{cause}{where}; {self._remedy()}"

    def _remedy(self) -> str:
        if self.mesh is None:
            looked = "" if self.state_dir is None else f"no mesh runs in {self.state_dir}; "
            return f"{looked}start one with `sluice up`, or check {ADDRESS_VARIABLE} and --address"
        if not self.is_named or self.address == self.mesh.address:
            return f"the mesh in {self.mesh.root} (pid {self.mesh.pid}) runs, see `sluice status`"
        return (
            f"the mesh in {self.mesh.root} is at {self.mesh.address}: leave out --address and "
            f"{ADDRESS_VARIABLE} to call it"
        )


_last: ContextVar[GatewayTarget | None] = ContextVar("target", default=None)


def target_of(address: str | None) -> GatewayTarget:
    """Return the gateway at `address`, else that of the running mesh, else the default; keep it as `last_target`."""
    try:
        state_dir: Path | None = state_root()
    except SetupError:
        state_dir = None
    mesh = None if state_dir is None else find_mesh(state_dir)
    chosen = address or (DEFAULT_ADDRESS if mesh is None else mesh.address)
    target = GatewayTarget(chosen, bool(address), mesh, state_dir)
    _last.set(target)
    return target


def last_target() -> GatewayTarget | None:
    """Return the gateway that this command called, for error messages."""
    return _last.get()
