"""What Anthropic's API has beside messages: which calls are of it, and the form of its errors.

Statuses are those of OpenAI's API here, but for one: what is refused because all places are taken has 529, Anthropic's
own. A gateway or model that is not there has 503, by which load balancers choose another gateway.
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
"""Header that the clients of this API send."""
REQUEST_ID: Final = "request-id"
"""Header of an answer with the name of its request."""
THREAD: Final = "thread"
"""Field by which tool runners let the server keep a conversation; told so, they send all of it themselves."""
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
"""Type of an error by its status; of the others those below 500 are the fault of the request."""


def is_anthropic(path: str, headers: Mapping[str, str]) -> bool:
    """Return whether a call is one of this API; paths that both APIs have are told apart by the header."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/") or VERSION in headers


def error_answer(error: SluiceError, named: Callable[[str], str], request_id: str) -> ErrorAnswer:
    """Return status, headers and body of an answer that is an error.

    Args:
        error: what to say.
        named: returns what the API calls the field at a path.
        request_id: of the call, where the error names no request.
    """
    busy = isinstance(error, Overloaded)
    status = _OVERLOADED if busy else http_status(error.code.value[0], error.reason)
    headers = {"x-request-id": request_id, **error_headers(error, status)}
    named_id = headers[REQUEST_ID] = headers["x-request-id"]
    body = error_body(status, _message(error, named), named_id)
    if any(one.field == THREAD for one in error.violations):
        body["error"]["details"] = {"error_code": "thread_unsupported_request"}
    return status, headers, body


def error_body(status: int, message: str, request_id: str) -> dict[str, Any]:
    """Return the body of an error; its message is cut, because it may quote a caller."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    described = {"type": kind, "message": message[:TEXT_MAX]}
    return {"type": "error", "error": described, "request_id": request_id}


def error_event(body: Mapping[str, Any]) -> bytes:
    """Return the event that ends a stream with the error of ``body``."""
    return named_event("error", body)


def _message(error: SluiceError, named: Callable[[str], str]) -> str:
    if isinstance(error, PromptTooLong):
        # Anthropic's words, by which agents know that they have to shorten the conversation.
        tokens, context = map(error.metadata.get, ("prompt_tokens", "context_tokens"))
        sizes = f"{tokens} tokens > {context} maximum: " if tokens and context else ""
        return f"prompt is too long: {sizes}{error.message}"
    if isinstance(error, UnknownModel):
        return f"model: {error.message}"
    said = [f"{named(one.field)}: {one.description}" for one in error.violations]
    return "; ".join(said) or error.message
