"""What a call of OpenAI's API asks: its body becomes a request, to which its headers add class, labels, key, deadline.

What is wrong is an error that names the field or header. Headers have names in lower case, as ASGI has them. The tenant
and the trace context are read from them as from a gRPC call's metadata: `sluice-tenant`, `traceparent`.
"""

import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final
from urllib.parse import urlsplit

from gateway.http.names import IDEMPOTENCY_KEY, LABEL
from gateway.identity.authenticator import AUTHORIZATION
from sluice.errors import InvalidRequest
from sluice.openai.fields import BadField, BadJson, check_kind, load_json
from sluice.openai.requests import request_of_body
from sluice.startup import is_loopback
from sluice.v1.inference_pb2 import EmbedRequest, GenerateRequest, Priority, RerankRequest
from sluice.wire.enums import value_of
from sluice.wire.subjects import CLASSES

PRIORITY: Final = "x-sluice-priority"
TIMEOUT: Final = "x-sluice-timeout"
API_KEY: Final = "x-api-key"
"""Has a key or token as clients of Anthropic's API send it."""
_OURS: Final = "x-sluice-"
ALLOW_DEGRADED: Final = "x-sluice-allow-degraded"
"""Whether a fallback may answer, where the body does not say it."""
_HOST: Final = re.compile(r"[A-Za-z0-9._:\[\]-]+")
"""What stands in `host`; browsers send nothing else, and `localhost/x` reads as localhost."""
_CLIENT_TIMEOUTS: Final = ("x-stainless-timeout", "x-stainless-read-timeout")
"""How long OpenAI's clients wait for a response, seconds."""


EXTENSIONS: Final = (
    *("seed", "logit_bias", "presence_penalty", "frequency_penalty", "min_p", "repetition_penalty"),
    *("min_tokens", "stop_token_ids", "regex", "chat_template_kwargs", "allow_degraded"),
)
"""Fields that bodies of other APIs than chats may have as well; some are not OpenAI's."""


def metadata_of(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return ``headers`` as a mapping, with the last of those that come twice, and an `API_KEY` as a bearer token."""
    metadata = dict(headers)
    if (key := metadata.pop(API_KEY, "")) and AUTHORIZATION not in metadata:
        metadata[AUTHORIZATION] = f"Bearer {key}"
    return metadata


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object of ``body``.

    Raises:
        InvalidRequest: it is none.
    """
    try:
        value = load_json(body.decode())
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not UTF-8") from None
    except BadJson as error:
        raise InvalidRequest(f"the body {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body is no JSON object")
    return value


_STREAM_OPTIONS: Final = ("include_usage", "include_obfuscation", "continuous_usage_stats")
"""Options of streams; the last two have no effect."""


def generate_request(url: str, body: Mapping[str, Any]) -> tuple[GenerateRequest, bool | None]:
    """What a body of ``url`` asks for, and whether its stream ends with the usage; None: it is not streamed.

    Raises:
        BadField: a field is not served, or its value does not fit.
    """
    asked = dict(body)
    with_usage = _take_stream_options(asked)
    return request_of_body(url, asked, GenerateRequest()), with_usage


def _take_stream_options(body: dict[str, Any]) -> bool | None:
    """Takes ``stream`` and ``stream_options`` out of ``body``; the rest is as of `generate_request`."""
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
            raise BadField(f"stream_options.{name}: is not served; leave it out")
        check_kind(f"stream_options.{name}", value, bool)
    return bool(options.get("include_usage"))


def host_of(headers: Mapping[str, str]) -> str:
    """Return the host that the client wanted to reach, without a port; empty if it names none, or no valid one."""
    return _name_in(headers.get("host", ""))


@lru_cache(maxsize=256)
def _name_in(host: str) -> str:
    return _host(f"//{host}") if _HOST.fullmatch(host) else ""


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_foreign_page(headers: Mapping[str, str]) -> bool:
    """Whether a web page of another site sent this through its reader's browser (Fetch Metadata, RFC 6454).

    Forms and uploads need no leave of ours, so the browser sends them, and what shows who its reader is. Pages of this
    machine may ask it; programs send none of these headers.
    """
    if headers.get("sec-fetch-site") == "cross-site":
        return True
    origin = headers.get("origin")
    if origin is None:
        return False
    page, host = _host(origin), host_of(headers)
    return not page or (page != host and not (is_loopback(page) and is_loopback(host)))


def class_of(headers: Mapping[str, str]) -> str:
    """The class of the call.

    Raises:
        InvalidRequest: it is none of the classes.
    """
    name = headers.get(PRIORITY, CLASSES[0])
    if name not in CLASSES:
        raise InvalidRequest.of(PRIORITY, f"must be one of {', '.join(CLASSES)}")
    return name


def timeout_s(headers: Mapping[str, str], *, streams: bool) -> float | None:
    """Seconds that the request may take; None: the gateway's default.

    Without our header it is as long as OpenAI's client waits; a client that streams waits that long for each piece.

    Raises:
        InvalidRequest: it is no time.
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
    if name in _CLIENT_TIMEOUTS:  # "None" of a client that waits for ever
        return None
    raise InvalidRequest.of(TIMEOUT, "must be a number of seconds above 0")


def add_headers(
    headers: Mapping[str, str],
    request: GenerateRequest | EmbedRequest | RerankRequest,
    *,
    streams: bool = False,
) -> float | None:
    """Adds what ``headers`` say to ``request``; returns `timeout_s`.

    Raises:
        InvalidRequest: a header of ours is unknown or has a wrong value.
    """
    request.priority = value_of(Priority, class_of(headers))
    if isinstance(request, GenerateRequest):
        request.idempotency_key = headers.get(IDEMPOTENCY_KEY, "")
        if ALLOW_DEGRADED in headers and not request.HasField("allow_degraded"):
            request.allow_degraded = _switch(headers, ALLOW_DEGRADED)
    request.labels.update(labels_of(headers))
    return timeout_s(headers, streams=streams)


def _switch(headers: Mapping[str, str], name: str) -> bool:
    """Return what the header ``name`` says.

    Raises:
        InvalidRequest: it is neither true nor false.
    """
    value = headers[name].lower()
    if value not in ("true", "false"):
        raise InvalidRequest.of(name, f"is {value[:20]!r}; send true or false")
    return value == "true"


def labels_of(headers: Mapping[str, str]) -> dict[str, str]:
    """The labels of a request.

    Raises:
        InvalidRequest: a header of ours is unknown.
    """
    labels = {}
    for name, value in headers.items():
        if name.startswith(LABEL):
            labels[name.removeprefix(LABEL)] = value
        elif name.startswith(_OURS) and name not in (PRIORITY, TIMEOUT, ALLOW_DEGRADED):
            raise InvalidRequest.of(name, "is no header of this API")
    return labels
