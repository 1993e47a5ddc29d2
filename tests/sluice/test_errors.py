"""Every error survives the wire: class, code, reason, details."""

import string
from urllib.parse import quote

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from sluice import errors

_PRINTABLE = "".join(set(string.printable) - set("%\t\n\r\x0b\x0c"))


@pytest.mark.parametrize("kind", errors.BY_REASON.values(), ids=lambda kind: kind.reason)
def test_an_error_comes_back_as_its_class(kind: type[errors.SluiceError]) -> None:
    sent = kind(
        "say what to do",
        metadata={"known": "small, large"},
        violations=[errors.FieldViolation("sampling.top_p", "must be in (0, 1]")],
        retry_after_s=1.5,
    )
    received = errors.from_status(
        status_pb2.Status.FromString(sent.to_status().SerializeToString())
    )
    assert type(received) is kind
    assert received.message == sent.message
    assert received.metadata == sent.metadata
    assert received.violations == sent.violations
    assert received.retry_after_s == 1.5


def test_every_class_has_a_reason_of_its_own() -> None:
    classes = _subclasses(errors.SluiceError)
    assert set(errors.BY_REASON.values()) == classes
    assert len(errors.BY_REASON) == len(classes)


def test_docstring_lists_each_class_with_code_and_reason() -> None:
    assert errors.__doc__ is not None
    for kind in errors.BY_REASON.values():
        assert f"| `{kind.__name__}` | {kind.code.name} | {kind.reason} |" in errors.__doc__


def test_details_are_left_out_where_there_are_none() -> None:
    status = errors.UnknownModel("no model 'x'").to_status()
    assert [detail.type_url.rsplit(".", 1)[1] for detail in status.details] == ["ErrorInfo"]
    received = errors.from_status(status)
    assert received is not None
    assert received.retry_after_s is None
    assert received.violations == ()


def test_texts_are_cut_to_what_trailers_take() -> None:
    error = errors.UnknownModel("known: " + "model, " * 2000, metadata={"models": "m, " * 2000})
    status = error.to_status()
    assert len(status.message) == errors.TEXT_MAX
    assert status.ByteSize() < 4096


@pytest.mark.parametrize("char", ["x", "%", "\x00", "\u00e9", "\u754c", "\U0001f600"])
def test_whatever_an_error_quotes_its_trailers_stay_below_8_kib(char: str) -> None:
    text = char * 5000
    many = [errors.FieldViolation(text, text) for _ in range(16)]
    for error in (
        errors.InvalidRequest(text, violations=many, metadata={"request_id": "r" * 40}),
        errors.LimitReached(text, metadata={"subject": text, "limit": "l", "value": "v"}),
        errors.SafetyBlocked(text, metadata={"rules": text, "policy": text[:100]}),
    ):
        _, message, ((_, details),) = error.as_abort()
        sent = len(quote(message, safe=_PRINTABLE)) + 4 * len(details) / 3  # base64
        assert sent < 8192 - 300  # less the other headers
        assert errors.from_status(status_pb2.Status.FromString(details)) is not None


def test_as_many_wrong_fields_are_named_as_fit() -> None:
    few = [errors.FieldViolation(f"f{i}", "must be less") for i in range(16)]
    long = [errors.FieldViolation(f"f{i}", "known: " + "m, " * 200) for i in range(16)]
    for given, named in ((few, 16), (long, 3)):
        received = errors.from_status(errors.InvalidRequest("no", violations=given).to_status())
        assert received is not None
        assert len(received.violations) == named


def test_a_status_of_another_system_is_not_taken_for_ours() -> None:
    status = status_pb2.Status(code=grpc.StatusCode.NOT_FOUND.value[0], message="elsewhere")
    assert errors.from_status(status) is None
    detail = status.details.add()
    detail.Pack(error_details_pb2.ErrorInfo(reason="MODEL_UNKNOWN", domain="elsewhere"))
    assert errors.from_status(status) is None


def test_unknown_reason_of_a_newer_server_is_our_error() -> None:
    status = status_pb2.Status(code=13, message="new kind")
    detail = status.details.add()
    detail.Pack(error_details_pb2.ErrorInfo(reason="FROM_THE_FUTURE", domain=errors.DOMAIN))
    assert isinstance(errors.from_status(status), errors.InternalError)


def _subclasses(kind: type[errors.SluiceError]) -> set[type[errors.SluiceError]]:
    # Of the tree itself: a client may add classes that never cross the wire.
    direct = {sub for sub in kind.__subclasses__() if sub.__module__ == errors.__name__}
    return direct.union(*(_subclasses(sub) for sub in direct))
