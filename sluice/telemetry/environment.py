"""OpenTelemetry's environment variables, made fit for its SDK.

The SDK reads the variables itself, and some of its parts raise on values that its specification calls "not set" or
"ignored": an empty one, a number that is none, a word that is unknown. `clean` takes those out before the SDK starts.
"""

import logging
import math
import os
from collections.abc import Callable, Mapping, MutableMapping
from typing import Final

logger = logging.getLogger(__name__)

_PREFIX: Final = "OTEL_"
_OTLP: Final = "OTEL_EXPORTER_OTLP_"
_OF_SIGNALS: Final = ("", "TRACES_", "METRICS_")
_SHARE: Final = (0.0, 1.0)
_COUNT: Final = (0, math.inf)
_POSITIVE: Final = (1, math.inf)
_NUMBERS: Final[Mapping[str, tuple[Callable[[str], float], tuple[float, float]]]] = {
    "OTEL_BSP_SCHEDULE_DELAY": (int, _POSITIVE),
    "OTEL_BSP_EXPORT_TIMEOUT": (int, _POSITIVE),
    "OTEL_BSP_MAX_QUEUE_SIZE": (int, _POSITIVE),
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": (int, _POSITIVE),
    "OTEL_METRIC_EXPORT_INTERVAL": (int, _POSITIVE),
    "OTEL_METRIC_EXPORT_TIMEOUT": (int, _POSITIVE),
    "OTEL_TRACES_SAMPLER_ARG": (float, _SHARE),
    **{f"{_OTLP}{signal}TIMEOUT": (float, (1e-3, math.inf)) for signal in _OF_SIGNALS},
    **{
        f"OTEL_{of}_LIMIT": (int, _COUNT)
        for of in (
            *("ATTRIBUTE_COUNT", "ATTRIBUTE_VALUE_LENGTH"),
            *("SPAN_ATTRIBUTE_COUNT", "SPAN_ATTRIBUTE_VALUE_LENGTH"),
            *("SPAN_EVENT_COUNT", "SPAN_LINK_COUNT"),
            *("EVENT_ATTRIBUTE_COUNT", "LINK_ATTRIBUTE_COUNT"),
        )
    },
}
"""Variables that are numbers: how each is read, and its smallest and largest value."""
_CAPTURE: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
SPAN: Final = "span"
EVENT: Final = "event"
_CAPTURED: Final[Mapping[str, frozenset[str]]] = {
    "true": frozenset({EVENT}),
    "false": frozenset(),
    "no_content": frozenset(),
    "span_only": frozenset({SPAN}),
    "event_only": frozenset({EVENT}),
    "span_and_event": frozenset({SPAN, EVENT}),
}
_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "OTEL_SDK_DISABLED": ("true", "false"),
    "OTEL_TRACES_SAMPLER": (
        *("always_on", "always_off", "traceidratio"),
        *("parentbased_always_on", "parentbased_always_off", "parentbased_traceidratio"),
    ),
    "OTEL_METRICS_EXEMPLAR_FILTER": ("always_on", "always_off", "trace_based"),
    f"{_OTLP}METRICS_TEMPORALITY_PREFERENCE": ("cumulative", "delta", "lowmemory"),
    f"{_OTLP}METRICS_DEFAULT_HISTOGRAM_AGGREGATION": (
        "explicit_bucket_histogram",
        "base2_exponential_bucket_histogram",
    ),
    _CAPTURE: tuple(_CAPTURED),
    **{f"{_OTLP}{signal}PROTOCOL": ("grpc", "http/protobuf") for signal in _OF_SIGNALS},
    **{f"{_OTLP}{signal}COMPRESSION": ("gzip", "deflate", "none") for signal in _OF_SIGNALS},
    **{f"{_OTLP}{signal}INSECURE": ("true", "false") for signal in _OF_SIGNALS},
}
"""Variables that are one of some words, whatever their case."""


def clean(environment: MutableMapping[str, str] = os.environ) -> None:
    """Remove OpenTelemetry's variables that are empty, and with a warning those that are invalid.

    Call it before anything else here, in each process. OTEL_SDK_DISABLED becomes two exporters that are "none".
    """
    for name in [name for name in environment if name.startswith(_PREFIX)]:
        value = environment[name].strip()
        if problem := _problem(name, value):
            logger.warning("%s: %r %s; the default is used", name, value, problem)
        if problem or not value or (name.endswith("_COMPRESSION") and value.lower() == "none"):
            del environment[name]
    if environment.pop("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        # An SDK that is disabled counts nothing, and `sluice top` asks processes what they have counted.
        environment.update(OTEL_TRACES_EXPORTER="none", OTEL_METRICS_EXPORTER="none")
    queue = int(environment.get("OTEL_BSP_MAX_QUEUE_SIZE", QUEUE_SPANS))
    batch = int(environment.get("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", _BATCH_SPANS))
    if batch > queue:
        # The SDK refuses it, also where only the queue was made smaller.
        environment["OTEL_BSP_MAX_EXPORT_BATCH_SIZE"] = str(queue)


QUEUE_SPANS: Final = 2048
"""Default of OTEL_BSP_MAX_QUEUE_SIZE."""
_BATCH_SPANS: Final = 512
"""Default of OTEL_BSP_MAX_EXPORT_BATCH_SIZE."""


def _problem(name: str, value: str) -> str:
    """Say what is wrong with a value; empty: nothing."""
    if not value:
        return ""
    if (words := _WORDS.get(name)) and value.lower() not in words:
        return f"is none of {', '.join(words)}"
    if name not in _NUMBERS:
        return ""
    read, (smallest, largest) = _NUMBERS[name]
    try:
        number = read(value)
    except ValueError:
        return f"is not {'an integer' if read is int else 'a number'}"
    if smallest <= number <= largest and number < math.inf:
        return ""
    return f"is out of range (from {smallest:g}{'' if largest == math.inf else f' to {largest:g}'})"


def content_capture() -> frozenset[str]:
    """Tell where texts of prompts and answers go: to a `SPAN` as attributes, to an `EVENT` on it; else nowhere."""
    return _CAPTURED.get(os.environ.get(_CAPTURE, "").strip().lower(), frozenset())
