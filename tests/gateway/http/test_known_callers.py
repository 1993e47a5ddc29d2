"""What the endpoint of a call does once it knows the caller."""

from functools import partial
from typing import Any

import pytest

from gateway.admission.arrivals import Arrivals
from gateway.admission.class_limiter import ClassLimiter
from gateway.http.call import AUTHENTICATED, Endpoint
from gateway.identity.authenticator import Authenticator
from gateway.identity.caller import ANY
from sluice.settings import CallShares, IdentitySettings


@pytest.mark.parametrize("asks_credentials", [False, True])
async def test_connection_hears_of_known_callers_alone(asks_credentials: bool) -> None:
    identity = IdentitySettings(api_keys=asks_credentials)
    arrivals = Arrivals(Authenticator(identity), ClassLimiter(8, CallShares()), 1024)
    known, sent = list[bool](), list[Any]()

    async def answer(_: Any) -> dict[str, Any]:
        return {}

    async def send(message: Any) -> None:
        sent.append(message)

    endpoint = Endpoint(arrivals, lambda _: {}, 1024, None, answer, ANY, False)
    scope: Any = {"type": "http", "method": "GET", "path": "/v1/models", "headers": []}
    await endpoint(scope | {AUTHENTICATED: partial(known.append, True)}, answer, send)
    assert sent[0]["status"] == (401 if asks_credentials else 200)
    assert known == ([] if asks_credentials else [True])
