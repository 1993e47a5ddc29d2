"""Give errors the form of OpenAI's API: HTTP status, type and code."""

from collections.abc import Mapping
from typing import Any, Final

from google.rpc import code_pb2

from sluice.errors import FIELD_MAX, TEXT_MAX

_STATUS: Final[Mapping[int, int]] = {
    code_pb2.INVALID_ARGUMENT: 400,
    code_pb2.FAILED_PRECONDITION: 400,
    code_pb2.UNAUTHENTICATED: 401,
    code_pb2.PERMISSION_DENIED: 403,
    code_pb2.NOT_FOUND: 404,
    code_pb2.ALREADY_EXISTS: 409,
    code_pb2.RESOURCE_EXHAUSTED: 429,
    code_pb2.CANCELLED: 499,
    code_pb2.UNIMPLEMENTED: 501,
    code_pb2.UNAVAILABLE: 503,
    code_pb2.DEADLINE_EXCEEDED: 504,
}
_STATUS_OF_REASON: Final[Mapping[str, int]] = {
    "CONTENT_ENCODING_UNSUPPORTED": 415,
    "BODY_TOO_SLOW": 408,
    "MESSAGE_TOO_LARGE": 413,
    "STORAGE_FULL": 507,
}
_CODES: Final[Mapping[str, str]] = {
    "MODEL_UNKNOWN": "model_not_found",
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "SAFETY_BLOCKED": "content_filter",
    "OVERLOADED": "rate_limit_exceeded",
    "LIMIT_REACHED": "rate_limit_exceeded",
    "BUDGET_SPENT": "insufficient_quota",
}
"""OpenAI's code by reason; other codes are the reason in lower case."""


def http_status(code: int, reason: str) -> int:
    """Return the HTTP status of an error with this gRPC code and this reason of `sluice.errors`."""
    return _STATUS_OF_REASON.get(reason) or _STATUS.get(code, 500)


def error_body(status: int, reason: str, message: str, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error; `param` names the wrong field. Texts are cut, because they may quote the caller."""
    code = _CODES.get(reason, reason.lower())
    param = None if param is None else param[:FIELD_MAX]
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 429:
        kind = "rate_limit_error"
    if reason == "EXPECTED_LATE":
        kind = "overloaded_error"
    described = {"message": message[:TEXT_MAX], "type": kind, "param": param, "code": code}
    return {"error": described}
