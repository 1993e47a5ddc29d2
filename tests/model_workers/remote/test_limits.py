"""When a server may be asked."""

import math

import pytest

from model_workers.remote.limits import LIMIT_S, LIMIT_S_MAX, PAUSE_S, Gate, retry_after_s

DATE = "Sun, 06 Nov 1994 08:49:37 GMT"
DATE_UNIX_S = 784111777.0


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({}, 0),
        ({"remaining-requests": "1", "reset-requests": "9s"}, 0),
        ({"remaining-requests": "0", "reset-requests": "9s"}, 9),
        ({"remaining-tokens": "0", "reset-tokens": "1m2.5s"}, LIMIT_S_MAX),
        ({"remaining-tokens": "0", "reset-tokens": "250ms"}, 0.25),
        ({"remaining-tokens": "0", "reset-tokens": "3"}, 3),
        ({"remaining-tokens": "0", "reset-tokens": "soon"}, LIMIT_S),
        ({"remaining-tokens": "0"}, LIMIT_S),
        ({"remaining-tokens": "none"}, 0),
    ],
)
def test_headers_say_when_the_limit_is_reached(headers: dict[str, str], wait_s: float) -> None:
    gate = Gate()
    gate.answered({f"x-ratelimit-{key}": value for key, value in headers.items()}, 100.0)
    assert gate.open_at == (100.0 + wait_s if wait_s else -math.inf)


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "20", "retry-after": "7"}, 0.02),
        ({"retry-after": DATE}, 37),
        ({"retry-after": "never"}, None),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "inf"}, None),
    ],
)
def test_retry_after(headers: dict[str, str], wait_s: float | None) -> None:
    assert retry_after_s(headers, DATE_UNIX_S - 37) == wait_s


def test_pause_grows_with_failures_until_an_answer() -> None:
    gate = Gate()
    gate.failed(0.0)
    gate.failed(0.0)  # on its way at the same time
    assert gate.open_at == PAUSE_S
    gate.failed(1.0)
    assert gate.open_at == 1.0 + 2 * PAUSE_S
    gate.answered({}, 2.0)
    gate.failed(3.0)
    assert gate.open_at == 3.0 + PAUSE_S
