"""What the headers of a call say."""

import pytest

from gateway.http.requests import add_headers, timeout_s
from sluice.errors import InvalidRequest
from sluice.v1.inference_pb2 import EmbedRequest, GenerateRequest

OURS = "x-sluice-timeout"
WHOLE, PIECE = "x-stainless-timeout", "x-stainless-read-timeout"


@pytest.mark.parametrize(
    ("headers", "whole", "streamed"),
    [
        ({}, None, None),
        ({WHOLE: "600"}, 600.0, None),
        ({PIECE: "5"}, 5.0, None),
        ({PIECE: "5", WHOLE: "600"}, 600.0, None),
        ({WHOLE: "None"}, None, None),
        ({WHOLE: "-1"}, None, None),
        ({OURS: "2.5"}, 2.5, 2.5),
        ({OURS: "2.5", WHOLE: "600", PIECE: "5"}, 2.5, 2.5),
    ],
)
def test_client_timeouts_do_not_bound_streams(
    headers: dict[str, str], whole: float | None, streamed: float | None
) -> None:
    assert timeout_s(headers, streams=False) == whole
    assert timeout_s(headers, streams=True) == streamed
    assert add_headers(headers, GenerateRequest(), streams=True) == streamed
    assert add_headers(headers, EmbedRequest()) == whole


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", ""])
@pytest.mark.parametrize("streams", [True, False])
def test_a_time_of_ours_that_is_none_is_refused(value: str, streams: bool) -> None:
    with pytest.raises(InvalidRequest) as refused:
        timeout_s({OURS: value, WHOLE: "600"}, streams=streams)
    assert [one.field for one in refused.value.violations] == [OURS]
