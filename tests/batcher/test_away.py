"""Whether a gateway is away, and for how long, by what NATS says of messages to it."""

from typing import Any

import pytest

from batcher.gateways import ABSENT_PAUSE_S, ABSENT_S, GRACE_S, RECONNECT_S, GatewayTransport


def known(at: float = 0.0) -> GatewayTransport:
    """Of a batcher that has heard of a gateway "g"."""
    client: Any = None
    gateways = GatewayTransport(client, "b")
    gateways.on_message("g", at)
    return gateways


def test_absence_starts_with_the_first_failed_message() -> None:
    gateways = known()
    assert gateways.absence_s("g", 10.0) == 0.0
    assert gateways.absence_s("g", 10.3) == pytest.approx(0.3)


def test_one_that_never_spoke_may_be_on_its_way() -> None:
    gateways = known()
    assert gateways.absence_s("other", 10.0) is None
    assert gateways.absence_s("other", 10.0 + 2 * GRACE_S) == pytest.approx(2 * GRACE_S)


def test_messages_far_apart_prove_no_time_between_them() -> None:
    gateways = known()
    gateways.absence_s("g", 10.0)
    assert gateways.absence_s("g", 10.1 + ABSENT_PAUSE_S) == 0.0


def test_a_gateway_that_speaks_is_there() -> None:
    gateways = known()
    gateways.absence_s("g", 10.0)
    gateways.on_message("g", 10.5)
    assert gateways.absence_s("g", 10.5 + GRACE_S / 2) is None
    assert gateways.absence_s("g", 10.6 + GRACE_S) == pytest.approx(0.1 + GRACE_S / 2)


def test_gateways_may_find_nats_again_later_than_this_batcher() -> None:
    gateways = known()
    gateways.on_reconnect(10.0)
    for now in (10.1, 10.9):
        assert gateways.absence_s("g", now) is None
    assert gateways.absence_s("g", 10.9 + RECONNECT_S) == pytest.approx(RECONNECT_S)


def test_what_was_known_of_a_gateway_that_is_gone_is_forgotten() -> None:
    gateways, now, away_s = known(), 1.0, 0.0
    while away_s < ABSENT_S:
        away_s = gateways.absence_s("g", now) or 0.0
        now += 1.0
    assert gateways.absence_s("g", now) == 0.0
