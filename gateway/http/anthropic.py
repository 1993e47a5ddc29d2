"""Recognize calls of Anthropic's API, and give errors its form.

HTTP statuses are those of OpenAI's API, with one exception: overload is 529, Anthropic's own status. An unavailable
gateway or model stays 503, by which load balancers choose another gateway.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from gateway.http.answers import ErrorAnswer, error_headers
from gateway.http.events import named_event
from sluice.errors import TEXT_MAX, Overloaded, PromptTooLong, SluiceError, UnknownModel
from sluice.openai.errors import http_status

MESSAGES: Final = "/v1/messages"
COUNT_TOKENS: Final = "/v1/messages/count_tokens"
VERSION: Final = "anthropic-version"
"""Header that every client of this API sends."""
REQUEST_ID: Final = "request-id"
"""Header of an answer with the id of its request."""
THREAD: Final = "thread"
"""Field by which tool runners ask the server to store a conversation. After the error that Anthropic's API defines for
it, they send the whole conversation themselves."""
_OVERLOADED: Final = 529
_TYPES: Final[Mapping[int, str]] = {
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


def is_anthropic(path: str, headers: Mapping[str, str]) -> bool:
    """Return whether a call is of this API; the header decides for paths that both APIs have."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/") or VERSION in headers


def error_answer(error: SluiceError, named: Callable[[str], str], request_id: str) -> ErrorAnswer:
    """Return an error as Anthropic's API has it.

    Args:
        error: The error.
        named: Returns the API's name of the field at a proto path.
        request_id: Id of the call, for an error without a request id.
    """
    status = http_status(error.code.value[0], error.reason)
    if isinstance(error, Overloaded):
        status = _OVERLOADED
    headers = {"x-request-id": request_id, **error_headers(error, status)}
    headers[REQUEST_ID] = headers["x-request-id"]
    body = error_body(status, _message(error, named), headers[REQUEST_ID])
    if any(violation.field == THREAD for violation in error.violations):
        body["error"]["details"] = {"error_code": "thread_unsupported_request"}
    return status, headers, body


def error_body(status: int, message: str, request_id: str) -> dict[str, Any]:
    """Return the body of an error; the message is cut, because it may quote the caller."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    described = {"type": kind, "message": message[:TEXT_MAX]}
    return {"type": "error", "error": described, "request_id": request_id}


def error_event(body: Mapping[str, Any]) -> bytes:
    """Return the event that ends a stream with the error in `body`."""
    return named_event("error", body)


def _message(error: SluiceError, named: Callable[[str], str]) -> str:
    if isinstance(error, PromptTooLong):
        # By Anthropic's words agents recognize that they have to shorten the conversation.
        tokens, context = map(error.metadata.get, ("prompt_tokens", "context_tokens"))
        sizes = f"{tokens} tokens > {context} maximum: " if tokens and context else ""
        return f"prompt is too long: {sizes}{error.message}"
    if isinstance(error, UnknownModel):
        return f"model: {error.message}"
    problems = [f"{named(wrong.field)}: {wrong.description}" for wrong in error.violations]
    return "; ".join(problems) or error.message
