"""What a registry holds."""

from opentelemetry.sdk.metrics.export import HistogramDataPoint

from sluice.telemetry.instruments import Instruments

Labels = frozenset[tuple[str, object]]


def values(registry: Instruments, name: str) -> dict[Labels, float]:
    """The values of a metric now, by their labels; of a histogram its counts."""
    return {
        frozenset(pair for pair in zip(found.labels, labels, strict=True) if pair[1]): (
            value.count if isinstance(value, HistogramDataPoint) else value
        )
        for found, points in registry.collect()
        if found.name == name
        for labels, value in points
    }
