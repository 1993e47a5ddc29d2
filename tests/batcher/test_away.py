"""For how long a gateway has been away, by what NATS says of messages to it."""

from typing import Any

import pytest

from batcher.gateways import ABSENT_PAUSE_S, ABSENT_S, RECONNECT_S, Gateways


def of_nobody() -> Gateways:
    client: Any = None
    return Gateways(client, "b")


def test_a_gateway_is_away_since_the_first_message_that_did_not_find_it() -> None:
    gateways = of_nobody()
    assert gateways._away_s("g", 10.0) == 0.0
    assert gateways._away_s("g", 10.3) == pytest.approx(0.3)
    assert gateways._away_s("other", 10.3) == 0.0


def test_messages_far_apart_prove_nothing() -> None:
    gateways = of_nobody()
    gateways._away_s("g", 10.0)
    assert gateways._away_s("g", 10.1 + ABSENT_PAUSE_S) == 0.0


def test_a_gateway_that_speaks_is_there() -> None:
    gateways = of_nobody()
    gateways._away_s("g", 10.0)
    gateways.heard("g")
    assert gateways._away_s("g", 11.0) == 0.0


def test_gateways_may_find_nats_again_later_than_this_batcher() -> None:
    gateways = of_nobody()
    gateways.restart(10.0)
    for now in (10.1, 10.9):
        assert gateways._away_s("g", now) == 0.0
    assert gateways._away_s("g", 10.9 + RECONNECT_S) == pytest.approx(RECONNECT_S)


def test_what_was_known_of_a_gateway_that_is_gone_is_forgotten() -> None:
    gateways = of_nobody()
    now, away_s = 0.0, 0.0
    while away_s < ABSENT_S:
        now += 1.0
        away_s = gateways._away_s("g", now)
    assert gateways._away_s("g", now + 1.0) == 0.0
