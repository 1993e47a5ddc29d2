"""Every metric, as catalog.toml beside this module declares it; docs/reference/metrics.md has it as tables."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import Any, Final, Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, eq=False)
class Metric:
    """One metric.

    Attributes:
        services: the processes that emit it; empty: all.
        what: for the documentation and the page.
        unit: of OpenTelemetry: "s", "{token}", "1" for a share; empty: none.
        labels: names of its attributes.
        bounds: of the buckets of a histogram.
    """

    name: str
    kind: Kind
    services: tuple[str, ...]
    what: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @cached_property
    def page_name(self) -> str:
        """The name that Prometheus knows, without the endings of counters and histograms."""
        name, word = self.name.replace(".", "_"), _UNIT_WORDS.get(self.unit, "")
        return f"{name}_{word}" if word else name

    @cached_property
    def page_labels(self) -> tuple[str, ...]:
        """The labels as Prometheus knows them."""
        return tuple(label.replace(".", "_") for label in self.labels)


_LISTS: Final = ("labels", "bounds")
_UNIT_WORDS: Final = {"s": "seconds", "1": "ratio"}


def _read() -> Iterator[Metric]:
    text = files(__package__).joinpath("catalog.toml").read_text(encoding="utf-8")
    for process, metrics in tomllib.loads(text).items():
        services = () if process == "every" else (f"sluice-{process}",)
        for name, declared in metrics.items():
            lists: dict[str, Any] = {key: tuple(declared.pop(key, ())) for key in _LISTS}
            yield Metric(name, declared.pop("kind"), services, **lists, **declared)


METRICS: Final[Mapping[str, Metric]] = {metric.name: metric for metric in _read()}
"""All of them by name, in the order of the documentation."""
