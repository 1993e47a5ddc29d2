"""The header "host" while callers show no credentials: a page that gives its name our address is refused."""

from pathlib import Path

import pytest

from gateway.http.call import Endpoint
from tests.gateway.kit.http import ask
from tests.gateway.kit.wire import open_wire


def endpoint(hosts: frozenset[str] | None) -> Endpoint:
    nothing: object = None
    return Endpoint(nothing, nothing, 0, hosts, nothing, frozenset(), False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hosts", "host", "served"),
    [
        (frozenset(), "localhost", True),
        (frozenset(), "127.0.0.1", True),
        (frozenset(), "evil.example", False),
        (frozenset(), "", False),
        (frozenset({"gateway"}), "gateway", True),
        (frozenset({"gateway"}), "gateway.evil.example", False),
        (frozenset({"gateway"}), "::1", True),
        (None, "any.example", True),
    ],
)
def test_hosts_beside_those_of_this_machine(
    hosts: frozenset[str] | None, host: str, served: bool
) -> None:
    assert endpoint(hosts).serves(host) is served


async def test_allow_remote_serves_no_foreign_names(nats_url: str, model_folder: Path) -> None:
    async with open_wire(nats_url, model_folder, http="127.0.0.1:0", allow_remote=True) as wire:
        reply = await ask(wire.http, "/v1/models", method="GET", host="evil.example")
        assert (reply.status, "http.hosts" in reply.error["message"]) == (403, True)
        assert (await ask(wire.http, "/v1/models", method="GET")).status == 200
