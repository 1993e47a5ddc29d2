"""OpenTelemetry's environment variables, where its SDK does not read them as its specification says.

The SDK reads the variables itself. What it cannot read costs a line in the log, and where a part of it refuses to
start, the traces or metrics of this process.
"""

import logging
import os
from collections.abc import Mapping, MutableMapping
from typing import Final

logger = logging.getLogger(__name__)

SPAN: Final = "span"
EVENT: Final = "event"
_EXEMPLARS: Final = "OTEL_METRICS_EXEMPLAR_FILTER"
_EXEMPLAR_FILTERS: Final = ("always_on", "always_off", "trace_based")
_CAPTURE: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_CAPTURED: Final[Mapping[str, frozenset[str]]] = {
    "true": frozenset({EVENT}),
    "span_only": frozenset({SPAN}),
    "event_only": frozenset({EVENT}),
    "span_and_event": frozenset({SPAN, EVENT}),
}


def clean(environment: MutableMapping[str, str] = os.environ) -> None:
    """Remove OpenTelemetry's variables that are empty, and a compression that is "none": both mean the default.

    An unknown exemplar filter is removed, too, with a warning. OTEL_SDK_DISABLED becomes two exporters that are "none":
    an SDK that is disabled counts nothing, and `sluice top` asks processes what they have counted. Call it before
    anything else here, in each process.
    """
    for name, value in list(environment.items()):
        word = value.strip().lower()
        if name.startswith("OTEL_") and (
            not word or (name.endswith("_COMPRESSION") and word == "none")
        ):
            del environment[name]
    exemplars = environment.get(_EXEMPLARS)
    if exemplars is not None and exemplars.strip().lower() not in _EXEMPLAR_FILTERS:
        # Every instrument would be refused.
        logger.warning("%s: no filter is called %r; the default is used", _EXEMPLARS, exemplars)
        del environment[_EXEMPLARS]
    if environment.pop("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        environment.update(OTEL_TRACES_EXPORTER="none", OTEL_METRICS_EXPORTER="none")


def content_capture() -> frozenset[str]:
    """Return where texts of prompts and answers go: to a `SPAN` as attributes, to an `EVENT` on it; else nowhere."""
    return _CAPTURED.get(os.environ.get(_CAPTURE, "").strip().lower(), frozenset())
