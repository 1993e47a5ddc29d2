"""The exporters of a process, as OpenTelemetry's environment variables name them, and its resource.

`sluice.telemetry.environment.clean` has removed variables that are empty before.
"""

import logging
import os
from collections.abc import Callable
from importlib.metadata import entry_points
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

from sluice import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

logger = logging.getLogger(__name__)

Signal = Literal["traces", "metrics"]

_OTLP: Final = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
"""Names of the exporters' entry points by OTEL_EXPORTER_OTLP_PROTOCOL."""
_LOUD: Final = "opentelemetry.exporter"
"""Loggers below this one write a line for each failed try; `Outage` writes one for all."""


def endpoint(signal: Signal) -> str:
    """Return the OTLP endpoint of a signal; empty: none was set."""
    own = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "")
    return own or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")


def protocol(signal: Signal) -> str:
    """Return the OTLP protocol of a signal."""
    own = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL")
    return (own or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc").strip().lower()


def triton_endpoint(setting: str | None) -> str | None:
    """Return where Triton sends its spans, OTLP over HTTP as JSON, with the path; None: nowhere.

    `setting` is telemetry.otlp_http_endpoint, which may be "none". Without it a collector takes JSON where it takes
    protobuf over HTTP.
    """
    if "OTEL_TRACES_EXPORTER" in os.environ:
        if not any(name.startswith("otlp") for name in exporter_names("traces")):
            return None
    elif not setting and not endpoint("traces"):
        return None
    if setting:
        return None if setting == "none" else setting
    base = endpoint("traces") or "http://localhost:4317"
    if protocol("traces") == "http/protobuf":
        own = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        return own or f"{base.rstrip('/')}{_TRACES_PATH}"
    url = urlsplit(base if "://" in base else f"//{base}")
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
    return f"{'https' if url.scheme == 'https' else 'http'}://{host}:4318{_TRACES_PATH}"


_TRACES_PATH: Final = "/v1/traces"


def exporter_names(signal: Signal) -> list[str]:
    """Name the exporters of a signal: those of OTEL_TRACES_EXPORTER or OTEL_METRICS_EXPORTER.

    Without that variable it is OTLP where an endpoint is set, unlike in the SDK, which would look for a collector on
    this machine.
    """
    named = os.environ.get(f"OTEL_{signal.upper()}_EXPORTER")
    if named is None:
        named = "otlp" if endpoint(signal) else "none"
    words = dict.fromkeys(word.strip().lower() for word in named.split(","))
    return [word for word in words if word not in ("none", "")]


def exporter_kinds(signal: Signal) -> list[type[Any]]:
    """Find the classes of a signal's exporters."""
    kinds = []
    for name in exporter_names(signal):
        full = _OTLP.get(protocol(signal), name) if name == "otlp" else name
        points = entry_points(group=f"opentelemetry_{signal}_exporter", name=full)
        if points:
            kinds.append(next(iter(points)).load())
        else:
            variable = f"OTEL_{signal.upper()}_EXPORTER"
            logger.warning("%s: no exporter is named %r; it is left out", variable, name)
    return kinds


def make_exporters(signal: Signal, kinds: list[type[Any]] | None = None) -> list[Any]:
    """Make the exporters of a signal; one that cannot be made is left out with an error in the log."""
    made = []
    for kind in exporter_kinds(signal) if kinds is None else kinds:
        try:
            made.append(kind())
        except Exception as error:  # telemetry shall not keep a process from starting
            logger.error("export of %s failed to start: %s", signal, error)
    return made


def send_last(signal: Signal, shut_down: Callable[[], None], timeout_s: float) -> None:
    """Send what is left of a signal: exporters try for 10 s, and a process that ends waits for `timeout_s`."""
    last = Thread(target=shut_down, name=f"last {signal}", daemon=True)
    last.start()
    last.join(timeout_s)
    if last.is_alive():
        logger.warning("dropped the last %s: %s does not answer", signal, endpoint(signal))


def resource_of(service: str, instance: str = "") -> "Resource":
    """Make the resource of a process; OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME override what it says."""
    # Imported here: `sluice up` asks for `triton_endpoint` alone.
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    own = {"service.name": service, "service.version": __version__}
    if instance:
        own["service.instance.id"] = instance
    attributes = OTELResourceDetector().detect().attributes
    return Resource.create({name: value for name, value in own.items() if name not in attributes})


class Outage:
    """Logs once that an exporter fails, and once that it works again; silences the exporters' own loggers."""

    def __init__(self, signal: Signal) -> None:
        self._signal = signal
        self._failed = False
        logging.getLogger(_LOUD).setLevel(logging.CRITICAL)

    def note(self, *, failed: bool) -> None:
        """Take the outcome of an export."""
        to = endpoint(self._signal) or "its exporter"
        if failed and not self._failed:
            logger.warning("OTLP export of %s to %s failed, dropping data", self._signal, to)
        elif self._failed and not failed:
            logger.info("OTLP export of %s to %s works again", self._signal, to)
        self._failed = failed
