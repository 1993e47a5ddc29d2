"""The two APIs that the HTTP port speaks, OpenAI's and Anthropic's: their errors and ids of requests."""

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
    """One of the APIs: the parts of an answer that do not depend on the call.

    Attributes:
        id_headers: Headers of an answer that carry the request id.
        named: Returns the API's name of the field at a proto path, for calls that have no table of names of their own.
        error: Returns status, headers and body of an error, given the names of fields and the request id.
        error_event: Returns the event that ends a stream, given the body of the error.
        no_route: Returns the body of an error about the URL, given status, message and request id.
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
    """Return the API of a call to `path`."""
    return ANTHROPIC if anthropic.is_anthropic(path, headers) else OPENAI
