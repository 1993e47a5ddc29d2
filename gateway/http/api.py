"""What differs between OpenAI's and Anthropic's API in every call, whatever it asks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.http import anthropic
from gateway.http.answers import ErrorAnswer, error_answer, sse
from gateway.http.names import plain_names
from sluice.errors import SluiceError
from sluice.openai.errors import error_body


@dataclass(frozen=True)
class Api:
    """The form of what any call may be answered with.

    Attributes:
        id_headers: of an answer, with the name of its request.
        named: returns what the API calls the field at a path of the proto, where no call knows better.
        error: returns status, headers and body of an error, by the names of fields and the request.
        error_event: returns the event that ends a stream, by the body of the error.
        no_route: returns the body of an error about the URL, by status, message and request.
    """

    id_headers: tuple[str, ...]
    named: Callable[[str], str]
    error: Callable[[SluiceError, Callable[[str], str], str], ErrorAnswer]
    error_event: Callable[[Mapping[str, Any]], bytes]
    no_route: Callable[[int, str, str], Mapping[str, Any]]


OPENAI: Final = Api(
    id_headers=("x-request-id",),
    named=plain_names,
    error=lambda error, named, request_id: error_answer(error, named),
    error_event=sse,
    no_route=lambda status, message, request_id: error_body(status, "unknown_url", message),
)
ANTHROPIC: Final = Api(
    id_headers=("x-request-id", anthropic.REQUEST_ID),
    named=str,
    error=anthropic.error_answer,
    error_event=anthropic.error_event,
    no_route=anthropic.error_body,
)


def api_of(path: str, headers: Mapping[str, str]) -> Api:
    """Return the API that a call to ``path`` speaks."""
    return ANTHROPIC if anthropic.is_anthropic(path, headers) else OPENAI
