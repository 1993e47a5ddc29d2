"""Turn the body and headers of an HTTP call into a request.

The body has the input and the options; headers add priority, labels, idempotency key and timeout. Names of headers are
in lower case, as in ASGI. Tenant and trace context (`sluice-tenant`, `traceparent`) are read from headers as from the
metadata of a gRPC call. Errors name the wrong field or header.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from gateway.http.names import IDEMPOTENCY_KEY, LABEL
from gateway.identity.authenticator import AUTHORIZATION
from sluice.errors import InvalidRequest
from sluice.openai.bodies import Part
from sluice.openai.fields import BadField, BadJson, check_kind, load_json
from sluice.openai.requests import request_of_body
from sluice.startup import is_loopback
from sluice.v1.inference_pb2 import EmbedRequest, GenerateRequest, Priority, RerankRequest
from sluice.wire.enums import value_of
from sluice.wire.subjects import CLASSES

Json = dict[str, Any]
PRIORITY: Final = "x-sluice-priority"
TIMEOUT: Final = "x-sluice-timeout"
API_KEY: Final = "x-api-key"
"""Header with an API key or token, as clients of Anthropic's API send it."""
_PREFIX: Final = "x-sluice-"
ALLOW_DEGRADED: Final = "x-sluice-allow-degraded"
"""Header that allows or forbids a fallback; a field of the body takes precedence."""
_HOST: Final = re.compile(r"[A-Za-z0-9._:\[\]-]+")
"""Valid characters of the header `host`. Others are refused, because `localhost/x` would parse as localhost."""
_CLIENT_TIMEOUTS: Final = ("x-stainless-timeout", "x-stainless-read-timeout")
"""Headers in which OpenAI's clients send their timeout for a response, in seconds."""


class Extensions(Part):
    """Fields that all bodies may have beside those of their API."""

    seed: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    min_tokens: Any = None
    stop_token_ids: Any = None
    regex: Any = None
    chat_template_kwargs: Any = None
    allow_degraded: Any = None


def metadata_of(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return `headers` as a mapping, in which an `API_KEY` is a bearer token; the last of repeated headers counts."""
    metadata = dict(headers)
    if (key := metadata.pop(API_KEY, "")) and AUTHORIZATION not in metadata:
        metadata[AUTHORIZATION] = f"Bearer {key}"
    return metadata


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`.

    Raises:
        InvalidRequest: It is not a JSON object in UTF-8.
    """
    try:
        value = load_json(body.decode())
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not UTF-8") from None
    except BadJson as error:
        raise InvalidRequest(f"the body {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body is not a JSON object")
    return value


_STREAM_OPTIONS: Final = ("include_usage", "include_obfuscation", "continuous_usage_stats")
"""Supported options of streams; the last two have no effect."""


def generate_request(url: str, body: Mapping[str, Any]) -> tuple[GenerateRequest, bool | None]:
    """Return the request of a body sent to `url`, and whether its stream ends with the usage; None if not streamed.

    Raises:
        BadField: A field is unsupported, or its value is invalid.
    """
    fields = dict(body)
    with_usage = _take_stream_options(fields)
    return request_of_body(url, fields, GenerateRequest()), with_usage


def _take_stream_options(body: dict[str, Any]) -> bool | None:
    """Remove `stream` and `stream_options` from `body`; return the second result of `generate_request`."""
    streams, options = body.pop("stream", None) or False, body.pop("stream_options", None)
    check_kind("stream", streams, bool)
    if options is None:
        return False if streams else None
    if not streams:
        raise BadField("stream_options: needs stream: true")
    check_kind("stream_options", options, dict)
    for name, value in options.items():
        if value is None:
            continue
        if name not in _STREAM_OPTIONS:
            raise BadField(f"stream_options.{name}: is not supported; leave it out")
        check_kind(f"stream_options.{name}", value, bool)
    return bool(options.get("include_usage"))


def host_of(headers: Mapping[str, str]) -> str:
    """Return the host in the header `host`, without the port; empty if there is none or it is invalid."""
    host = headers.get("host", "")
    return _host(f"//{host}") if _HOST.fullmatch(host) else ""


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_foreign_page(headers: Mapping[str, str]) -> bool:
    """Return whether a web page of another site sent this from a user's browser (Fetch Metadata, RFC 6454).

    Browsers send forms and uploads to other sites without asking, together with the user's credentials. Pages of this
    machine may call the gateway. Programs send none of these headers.
    """
    if headers.get("sec-fetch-site") == "cross-site":
        return True
    origin = headers.get("origin")
    if origin is None:
        return False
    page, host = _host(origin), host_of(headers)
    return not page or (page != host and not (is_loopback(page) and is_loopback(host)))


def class_of(headers: Mapping[str, str]) -> str:
    """Return the class in the header `PRIORITY`, by default the first.

    Raises:
        InvalidRequest: It is not one of the classes.
    """
    name = headers.get(PRIORITY, CLASSES[0])
    if name not in CLASSES:
        raise InvalidRequest.of(PRIORITY, f"must be one of {', '.join(CLASSES)}")
    return name


def timeout_s(headers: Mapping[str, str], *, streams: bool) -> float | None:
    """Return the timeout of the request in seconds; None for the gateway's default.

    Without the header `TIMEOUT` it is the timeout of OpenAI's client, but not for streams: there that timeout is the
    client's limit between two pieces.

    Raises:
        InvalidRequest: `TIMEOUT` is not a positive number. An invalid timeout of OpenAI's client counts as none.
    """
    names = (TIMEOUT,) if streams else (TIMEOUT, *_CLIENT_TIMEOUTS)
    name = next((name for name in names if name in headers), None)
    if name is None:
        return None
    try:
        seconds = float(headers[name])
    except ValueError:
        seconds = math.nan
    if 0 < seconds < math.inf:
        return seconds
    if name in _CLIENT_TIMEOUTS:  # "None": the client waits for ever
        return None
    raise InvalidRequest.of(TIMEOUT, "must be a number of seconds above 0")


def add_headers(
    headers: Mapping[str, str],
    request: GenerateRequest | EmbedRequest | RerankRequest,
    *,
    streams: bool = False,
) -> float | None:
    """Add priority, idempotency key and labels of `headers` to `request`; return `timeout_s`.

    Raises:
        InvalidRequest: An x-sluice header is unknown or has an invalid value.
    """
    request.priority = value_of(Priority, class_of(headers))
    if isinstance(request, GenerateRequest):
        request.idempotency_key = headers.get(IDEMPOTENCY_KEY, "")
        if ALLOW_DEGRADED in headers and not request.HasField("allow_degraded"):
            value = headers[ALLOW_DEGRADED].lower()
            if value not in ("true", "false"):
                raise InvalidRequest.of(ALLOW_DEGRADED, f"is {value[:20]!r}; send true or false")
            request.allow_degraded = value == "true"
    request.labels.update(labels_of(headers))
    return timeout_s(headers, streams=streams)


def labels_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that headers set.

    Raises:
        InvalidRequest: An x-sluice header is unknown.
    """
    labels = {}
    for name, value in headers.items():
        if name.startswith(LABEL):
            labels[name.removeprefix(LABEL)] = value
        elif name.startswith(_PREFIX) and name not in (PRIORITY, TIMEOUT, ALLOW_DEGRADED):
            raise InvalidRequest.of(name, "is not a header of this API; leave it out")
    return labels
