"""The error that a call ends with is sent, also when the code that sends it fails."""

import logging

import grpc
import pytest

from gateway.admission.request_context import fail_with
from sluice.errors import InternalError, InvalidRequest, SluiceError


class Sender:
    """Takes errors; fails as often as it is told to.

    Attributes:
        sent: the errors that it took.
    """

    def __init__(self, failures: int = 0, fault: type[Exception] = KeyError) -> None:
        self.sent: list[SluiceError] = []
        self._failures = failures
        self._fault = fault

    async def __call__(self, error: SluiceError) -> None:
        if self._failures:
            self._failures -= 1
            raise self._fault("context_tokens")
        self.sent.append(error)


async def ends_with(error: Exception) -> None:
    raise error


async def test_an_exception_is_logged_and_not_quoted(caplog: pytest.LogCaptureFixture) -> None:
    sender = Sender()
    await fail_with(ends_with(ValueError("a word of a library")), sender, "req-1")
    assert [type(error) for error in sender.sent] == [InternalError]
    assert "library" not in str(sender.sent[0])
    assert "req-1" in caplog.text


async def test_an_error_that_cannot_be_sent_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    sender = Sender(failures=1)
    with caplog.at_level(logging.ERROR):
        await fail_with(ends_with(InvalidRequest("wrong")), sender, "req-1")
    assert [type(error) for error in sender.sent] == [InternalError]
    assert "sending REQUEST_INVALID to a caller failed: req-1" in caplog.text
    assert "context_tokens" in caplog.text


async def test_an_abort_of_grpc_passes() -> None:
    sender = Sender(failures=1, fault=grpc.aio.AbortError)
    with pytest.raises(grpc.aio.AbortError):
        await fail_with(ends_with(InvalidRequest("wrong")), sender, "req-1")
