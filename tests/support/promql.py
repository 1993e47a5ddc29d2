"""Which names of metrics and labels an expression of Prometheus holds, and which ones a mesh has."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from sluice.telemetry.catalog import METRICS, Metric

_STRINGS: Final = re.compile(r'"[^"]*"')
_NAMES: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_SELECTORS: Final = re.compile(r"\{([^}]*)\}")
_GROUPS: Final = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_RANGES: Final = re.compile(r"\[[^\]]*\]")
_WORDS: Final = frozenset(
    {
        *("sum", "max", "min", "avg", "count", "rate", "increase", "histogram_quantile", "topk"),
        *("by", "without", "on", "ignoring", "group_left", "group_right", "and", "or", "unless"),
        *("clamp_min", "clamp_max", "vector"),
    }
)
_OF_PROMETHEUS: Final = frozenset(
    {"up", "process_cpu_seconds_total", "process_resident_memory_bytes"}
)
_LABELS: Final = frozenset({"le", "job", "instance"})


def recorded(rules: Iterable[Mapping[str, Any]]) -> dict[str, set[str]]:
    """The names that recording rules make, each with its labels."""
    return {
        rule["record"]: names_in(rule["expr"])[1] - {"le"} for rule in rules if "record" in rule
    }


def names_in(expression: str) -> tuple[set[str], set[str]]:
    """Names of metrics, and of labels."""
    text = _RANGES.sub("", _STRINGS.sub('""', expression))
    labels = {
        name
        for part in (*_SELECTORS.findall(text), *_GROUPS.findall(text))
        for name in _NAMES.findall(part)
    }
    rest = _GROUPS.sub("", _SELECTORS.sub("", text))
    return set(_NAMES.findall(rest)) - _WORDS - {"e", "Inf", "NaN"}, labels


def endings(metric: Metric) -> set[str]:
    """The names of a metric on a page."""
    words = {
        "counter": ("_total",),
        "gauge": ("",),
        "histogram": ("_bucket", "_count", "_sum"),
    }[metric.kind]
    return {metric.page_name + word for word in words}


def pages() -> dict[str, set[str]]:
    """The names on the pages of a mesh, each with its labels."""
    return {
        name: set(metric.page_labels) for metric in METRICS.values() for name in endings(metric)
    }


def problems(expression: str, recorded: dict[str, set[str]]) -> list[str]:
    """What ``expression`` names that nothing emits; ``recorded`` are the labels of recording rules."""
    known = pages() | recorded
    metrics, labels = names_in(expression)
    wrong = [f"no metric {name}" for name in sorted(metrics - known.keys() - _OF_PROMETHEUS)]
    has = set().union(_LABELS, *(known.get(name, set()) for name in metrics))
    return wrong + [f"no label {name}" for name in sorted(labels - has)]
