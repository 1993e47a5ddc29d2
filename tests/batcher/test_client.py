"""The order of a channel's reports while its request is replaced."""

import re
from collections.abc import Iterable
from typing import Any

import grpc.aio
import pytest
from tritonclient.grpc import service_pb2

from batcher.core.workers import ChannelBroken
from batcher.workers import client
from batcher.workers.client import Reports, WorkerClient, WorkerRefused, reason_of, step_report
from sluice.internal.v1 import worker_pb2
from sluice.startup import free_port

COMPLETE = -1
"""A request is complete."""


class Stream:
    """What comes on a stream: reports by number."""

    def __init__(self, *numbers: int, worker: str = "") -> None:
        self._numbers = list(numbers)
        self._worker = worker

    async def read(self) -> Any:
        if not self._numbers:
            return grpc.aio.EOF
        number = self._numbers.pop(0)
        contents = []
        if number != COMPLETE:
            report = worker_pb2.StepReport(worker=self._worker, sequence=number)
            contents.append(report.SerializeToString())
        infer = service_pb2.ModelInferResponse(raw_output_contents=contents)
        return service_pb2.ModelStreamInferResponse(infer_response=infer)


async def renewed(*numbers: int, count: int) -> list[int]:
    """The first ``count`` reports, where 0 and 1 came before the renewal."""
    stream: Any = Stream(0, 1, *numbers)
    reports = Reports(stream)
    found = [(await reports.next()).sequence for _ in range(2)]
    reports.is_renewing = True
    return found + [(await reports.next()).sequence for _ in range(count - 2)]


@pytest.mark.parametrize(
    "numbers",
    [
        (2, 3, COMPLETE, 4, 5),
        (2, COMPLETE, 3, 4, 5),
        (4, 5, 2, 3, COMPLETE),
        (3, 2, COMPLETE, 4, 5),
        (COMPLETE, 2, 3, 4, 5),
    ],
)
async def test_reports_of_a_new_request_may_overtake_old_ones(numbers: Iterable[int]) -> None:
    assert await renewed(*numbers, count=6) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("numbers", [(3, 4, COMPLETE, 5), (2, COMPLETE, COMPLETE, 3), (3, 4)])
async def test_what_is_missing_breaks_the_channel(numbers: Iterable[int]) -> None:
    with pytest.raises(ChannelBroken):
        await renewed(*numbers, count=6)


@pytest.mark.parametrize(("names", "reports"), [(0, 9), (10 * client.RESPONSE_BYTES, 1)])
async def test_request_is_renewed_when_triton_keeps_many_responses(
    names: int, reports: int
) -> None:
    stream: Any = Stream(*range(20), COMPLETE, 20, worker="w" * names)
    found = Reports(stream, 9 * client.RESPONSE_BYTES)
    for _ in range(reports):
        assert not found.wants_renewal
        await found.next()
    assert found.wants_renewal
    found.is_renewing = True
    while found.is_renewing:
        assert not found.wants_renewal
        await found.next()
    assert found.wants_renewal == bool(names)  # of the new request


def test_refused_request_is_told_from_a_report() -> None:
    report = worker_pb2.StepReport(refused="the worker is overloaded or closing")
    infer = service_pb2.ModelInferResponse(raw_output_contents=[report.SerializeToString()])
    with pytest.raises(WorkerRefused, match="overloaded"):
        step_report(service_pb2.ModelStreamInferResponse(infer_response=infer))


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:{port}", "connection refused$"),
        ("unix:/nonexistent/socket", "UNAVAILABLE: "),
    ],
)
async def test_reason_of_a_refused_connection_is_short(address: str, reason: str) -> None:
    worker = WorkerClient(address.format(port=free_port()), "echo")
    stream = worker.stream()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stream.read()
    await worker.close()
    assert re.match(reason, reason_of(raised.value))
