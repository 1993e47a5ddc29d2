"""Read traces from Jaeger's query API, the JSON that its user interface reads (`/api/traces`)."""

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Final
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen

from cli.failure import CommandFailed
from cli.trace_rules import TraceSpan

WAIT_S: Final = 10.0
"""How long Jaeger may take to accept a connection, and to send more of its answer, in seconds."""
BYTES_MAX: Final = 256 << 20
"""Largest answer that is read, in bytes: a trace of a job may have many thousand spans."""
_HEX: Final = re.compile(r"[0-9a-f]{1,32}")


@dataclass(frozen=True)
class JaegerTrace:
    """One trace: its id, 32 hex digits, and its spans."""

    trace_id: str
    spans: tuple[TraceSpan, ...]


class Jaeger:
    """The query API at one address, such as "http://127.0.0.1:16686", with the base path if there is one.

    Raises:
        CommandFailed: it is no HTTP address.
    """

    def __init__(self, url: str) -> None:
        self._url = (url if "://" in url else f"http://{url}").rstrip("/")
        parts = urlsplit(self._url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            message = f"--jaeger: {url!r} is no address; write http://HOST:16686"
            raise CommandFailed("USAGE", message)

    def find(
        self, service: str, limit: int, lookback_s: float, before_s: float
    ) -> list[JaegerTrace]:
        """Return up to `limit` traces of `service` that began in the last `lookback_s` seconds.

        `before_s`: leave out those that began less than so many seconds ago.

        Raises:
            CommandFailed: Jaeger does not answer, or it is none.
        """
        end = time.time() - before_s
        query = {
            "service": service,
            "limit": limit,
            "start": int((end - lookback_s) * 1e6),
            "end": int(end * 1e6),
        }
        return self._read(f"?{urlencode(query)}")

    def get(self, trace_id: str) -> JaegerTrace | None:
        """Return one trace, or None if Jaeger does not have it; raises as `find`."""
        return next(iter(self._read(f"/{trace_id}")), None)

    def _read(self, suffix: str) -> list[JaegerTrace]:
        """Return the traces that are asked for, none where they are not found."""
        try:
            status, body = self._fetch(suffix)
        except (OSError, HTTPException) as error:
            raise self._failure("UNREACHABLE", str(error) or type(error).__name__) from error
        if len(body) > BYTES_MAX:
            message = (
                f"the answer has more than {BYTES_MAX} bytes; ask for fewer traces with --limit"
            )
            raise CommandFailed("TOO_LARGE", message)
        try:
            answer = json.loads(body)
            # Other servers say in JSON, too, that they have no such page; Jaeger does it without data.
            traces = [_trace(trace) for trace in answer["data"] or ()]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._failure("NOT_JAEGER", f"HTTP {status}, {error!r}") from error
        if status not in (200, 404):
            raise self._failure("JAEGER", f"HTTP {status} {answer.get('errors')}")
        return traces

    def _fetch(self, suffix: str) -> tuple[int, bytes]:
        """Return status and body of an answer, of an error too."""
        try:
            with urlopen(f"{self._url}/api/traces{suffix}", timeout=WAIT_S) as response:
                return response.status, response.read(BYTES_MAX + 1)
        except HTTPError as error:
            with error:
                return error.code, error.read(BYTES_MAX + 1)

    def _failure(self, reason: str, problem: str) -> CommandFailed:
        return CommandFailed(
            reason,
            f"{self._url} does not answer as Jaeger: {problem}; name the query service with --jaeger (port 16686), and "
            "its base path if it has one",
        )


def _trace(trace: Mapping[str, Any]) -> JaegerTrace:
    services = {name: process["serviceName"] for name, process in trace["processes"].items()}
    spans = tuple(_span(span, services) for span in trace["spans"])
    return JaegerTrace(full_id(trace["traceID"]), spans)


def _span(span: Mapping[str, Any], services: Mapping[str, str]) -> TraceSpan:
    """Read a span. Its parent is a reference in its own trace; all other references are links."""
    trace_id, start_ns = full_id(span["traceID"]), int(span["startTime"]) * 1000
    parent, links = "", list[tuple[str, str]]()
    for reference in span.get("references") or ():
        key = full_id(reference["traceID"]), _hex(reference["spanID"], 16)
        if reference["refType"] == "CHILD_OF" and key[0] == trace_id and not parent:
            parent = key[1]
        else:
            links.append(key)
    return TraceSpan(
        services[span["processID"]],
        span["operationName"],
        _hex(span["spanID"], 16),
        parent,
        start_ns,
        start_ns + int(span["duration"]) * 1000,
        dict(_tags(span)),
        tuple(links),
    )


def _tags(span: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes; Jaeger writes lists as JSON in a string."""
    for tag in span.get("tags") or ():
        value = tag["value"]
        if isinstance(value, str) and value.startswith("["):
            with suppress(ValueError):
                value = tuple(json.loads(value))
        yield tag["key"], value


def full_id(trace_id: str) -> str:
    """Return a trace id with all its digits: Jaeger leaves out zeros at the beginning.

    Raises:
        ValueError: it is none.
    """
    return _hex(trace_id, 32)


def _hex(text: str, digits: int) -> str:
    text = text.lower()
    if not _HEX.fullmatch(text) or len(text) > digits:
        raise ValueError(f"{text!r} is no id of {digits} hex digits")
    return text.zfill(digits)
