"""Faults of a server with OpenAI's API, and what follows from each."""

import json
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, Final

from sluice.errors import EngineFailed, InvalidRequest, ModelUnavailable, Overloaded, SluiceError

CODE_CHARS_MAX: Final = 80
_OF_REQUEST: Final = frozenset({"400", "413", "422"})
"""Statuses that concern the request."""
_TYPES_OF_REQUEST: Final = frozenset({"invalid_request_error", "BadRequestError"})


class Retry(Enum):
    """Whether the same request may be sent again, and when."""

    NEVER = auto()
    """It would fail again."""
    SOON = auto()
    """The server has failed or is unreachable."""
    WHEN_ALLOWED = auto()
    """The server has refused it for now: a rate limit."""


class ServerFault(Exception):
    """The server did not answer a request as it should.

    Attributes:
        message: One sentence, without any text of the prompt; a server's own message may contain some.
        kind: The error that the caller sees if nothing helps.
        retry_after_s: As the server said; None: it did not.
        status: HTTP status; 0: there was none.
    """

    def __init__(
        self,
        message: str,
        kind: type[SluiceError] = EngineFailed,
        retry: Retry = Retry.SOON,
        retry_after_s: float | None = None,
        status: int = 0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.retry = retry
        self.retry_after_s = retry_after_s


def fault_of_status(status: int, body: bytes, retry_after_s: float | None) -> ServerFault:
    """Return the fault of an answer with an error status."""
    kind: type[SluiceError] = InvalidRequest
    retry, hint = Retry.NEVER, ""
    if status == 429 or (status == 503 and retry_after_s is not None):
        kind, retry = Overloaded, Retry.WHEN_ALLOWED
    elif status in (401, 402, 403):
        kind, hint = ModelUnavailable, ": see the key in the model's settings"
    elif status == 404:
        kind, hint = ModelUnavailable, ": see url and model in the model's settings"
    elif status in (408, 409, 425) or not 400 <= status < 500:
        kind, retry = ModelUnavailable, Retry.SOON
    message = f"the server answered {status}{_codes(body)}{hint}"
    return ServerFault(message, kind, retry, retry_after_s, status)


def fault_in_stream(error: Any) -> ServerFault:
    """Return the fault of an `error` inside a stream, where a server may also say that the request is wrong."""
    message = f"the server broke the answer off{_named(error)}"
    if _is_of_request(error):
        return ServerFault(message, InvalidRequest, Retry.NEVER)
    return ServerFault(message)


def _is_of_request(error: Any) -> bool:
    """Return whether `error` concerns the request: by its status (vLLM), or by OpenAI's type."""
    if not isinstance(error, Mapping):
        return False
    status = error.get("code", error.get("status"))
    return str(status) in _OF_REQUEST or error.get("type") in _TYPES_OF_REQUEST


def _codes(body: bytes) -> str:
    """Return the names of an error without its message, because some servers repeat the prompt in it."""
    try:
        value = json.loads(body)
    except ValueError:
        return ""
    return _named(value.get("error", value)) if isinstance(value, dict) else ""


def _named(error: Any) -> str:
    if not isinstance(error, Mapping):
        return ""
    names = [error.get(key) for key in ("type", "code", "param")]
    words = [
        word[:CODE_CHARS_MAX] for word in names if isinstance(word, str) and word.isprintable()
    ]
    return f" ({', '.join(words)})" if words else ""
