"""The two APIs that the HTTP port speaks, OpenAI's and Anthropic's: their errors and ids of requests.

HTTP statuses of errors are OpenAI's, with one exception: in Anthropic's API overload is 529, its own status. An
unavailable gateway or model stays 503, by which load balancers choose another gateway.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from typing_extensions import override

from gateway.http.answers import sse
from gateway.http.encodings import GZIP
from gateway.http.events import named_event
from gateway.http.names import plain_names
from sluice.errors import TEXT_MAX, Overloaded, PromptTooLong, SluiceError, UnknownModel
from sluice.openai.errors import error_body, http_status

MESSAGES: Final = "/v1/messages"
COUNT_TOKENS: Final = "/v1/messages/count_tokens"
VERSION: Final = "anthropic-version"
"""Header that every client of Anthropic's API sends."""
THREAD: Final = "thread"
"""Field by which tool runners ask the server to store a conversation. After the error that Anthropic's API defines for
it, they send the whole conversation themselves."""
Names = Callable[[str], str]
"""Returns an API's name of the field at a proto path."""
ErrorAnswer = tuple[int, dict[str, str], dict[str, Any]]
"""HTTP status, headers and body of an error."""
_CLIENT_WAIT_S_MAX: Final = 60.0
"""Longest wait that clients obey, in seconds; after a longer one they retry at once."""
_HEADERS_OF: Final[Mapping[int, Mapping[str, str]]] = {
    401: {"www-authenticate": "Bearer"},
    415: {"accept-encoding": GZIP},
}
"""Headers that HTTP requires with a status."""
_RETRIED: Final = (409, 429)
"""Statuses below 500 that clients retry, unless a header says otherwise."""
_OVERLOADED: Final = 529
_ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}
"""Type of an error by its status. Other statuses are `invalid_request_error` below 500, else `api_error`."""


class OpenAi:
    """OpenAI's API.

    Attributes:
        id_headers: Headers of an answer that carry the request id.
    """

    id_headers: tuple[str, ...] = ("x-request-id",)

    def named(self, path: str) -> str:
        """Return the name of the field at a proto path, for calls that have no table of names."""
        return plain_names(path)

    def error(self, error: SluiceError, named: Names, request_id: str) -> ErrorAnswer:
        """Return an error as the API has it; `request_id` is for an error without a request id."""
        if "request_id" in error.metadata:
            request_id = error.metadata["request_id"]
        status = self._status(error)
        headers = dict.fromkeys(self.id_headers, request_id) | _headers(error, status)
        return status, headers, self._body(error, status, named, request_id)

    def event(self, body: Mapping[str, Any]) -> bytes:
        """Return the event that ends a stream with the error in `body`."""
        return sse(body)

    def no_route(self, status: int, message: str, request_id: str) -> dict[str, Any]:
        """Return the body of an error about the URL."""
        return error_body(status, "unknown_url", message)

    def _status(self, error: SluiceError) -> int:
        return http_status(error.code.value[0], error.reason)

    def _body(
        self, error: SluiceError, status: int, named: Names, request_id: str
    ) -> dict[str, Any]:
        message, param = _problems(error, named), None
        if error.violations:
            param = named(error.violations[0].field)
        if isinstance(error, UnknownModel):
            message, param = error.message, "model"
        if isinstance(error, PromptTooLong):
            # Clients recognize the error by OpenAI's words, whatever its code. Errors of workers lack the limit.
            context = "exceeded"
            if "context_tokens" in error.metadata:
                context = f"{error.metadata['context_tokens']} tokens"
            message = f"this model's maximum context length is {context}: {message}"
        return error_body(status, error.reason, message, param)


class Anthropic(OpenAi):
    """Anthropic's API."""

    id_headers = ("x-request-id", "request-id")

    @override
    def named(self, path: str) -> str:
        return path

    @override
    def event(self, body: Mapping[str, Any]) -> bytes:
        return named_event("error", body)

    @override
    def no_route(self, status: int, message: str, request_id: str) -> dict[str, Any]:
        # The message is cut, because it may quote the caller.
        kind = "invalid_request_error" if status < 500 else "api_error"
        described = {"type": _ANTHROPIC_TYPES.get(status, kind), "message": message[:TEXT_MAX]}
        return {"type": "error", "error": described, "request_id": request_id}

    @override
    def _status(self, error: SluiceError) -> int:
        return _OVERLOADED if isinstance(error, Overloaded) else super()._status(error)

    @override
    def _body(
        self, error: SluiceError, status: int, named: Names, request_id: str
    ) -> dict[str, Any]:
        message = _problems(error, named)
        if isinstance(error, UnknownModel):
            message = f"model: {error.message}"
        if isinstance(error, PromptTooLong):
            # By Anthropic's words agents recognize that they have to shorten the conversation.
            tokens, context = map(error.metadata.get, ("prompt_tokens", "context_tokens"))
            sizes = f"{tokens} tokens > {context} maximum: " if tokens and context else ""
            message = f"prompt is too long: {sizes}{error.message}"
        body = self.no_route(status, message, request_id)
        if any(violation.field == THREAD for violation in error.violations):
            body["error"]["details"] = {"error_code": "thread_unsupported_request"}
        return body


OPENAI: Final = OpenAi()
ANTHROPIC: Final = Anthropic()


def api_of(path: str, headers: Mapping[str, str]) -> OpenAi:
    """Return the API of a call to `path`; a header decides for paths that both APIs have."""
    is_anthropic = path == MESSAGES or path.startswith(f"{MESSAGES}/") or VERSION in headers
    return ANTHROPIC if is_anthropic else OPENAI


def _problems(error: SluiceError, named: Names) -> str:
    """Return the message of an error, with the API's names of the wrong fields."""
    problems = [f"{named(wrong.field)}: {wrong.description}" for wrong in error.violations]
    return "; ".join(problems) or error.message


def _headers(error: SluiceError, status: int) -> dict[str, str]:
    """Return the headers of an error, by which clients decide whether and when to retry."""
    headers = dict(_HEADERS_OF.get(status, {}))
    wait_s = error.retry_after_s
    if wait_s is not None:
        headers["retry-after"] = str(max(1, -int(-wait_s // 1)))
        headers["retry-after-ms"] = str(round(1000 * wait_s))
    # Clients would ignore a longer wait and retry at once, so they are told not to retry at all.
    if (wait_s is None or wait_s > _CLIENT_WAIT_S_MAX) and (status >= 500 or status in _RETRIED):
        headers["x-should-retry"] = "false"
    return headers
