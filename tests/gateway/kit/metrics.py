"""What a registry holds."""

from sluice.telemetry.catalog import Metric
from sluice.telemetry.registry import MetricRegistry, Series

Labels = frozenset[tuple[str, object]]


def values(registry: MetricRegistry, metric: Metric) -> dict[Labels, float]:
    """The values of a metric now, by their labels; of a histogram its counts."""
    return {
        frozenset(pair for pair in zip(metric.labels, labels, strict=True) if pair[1]): (
            sum(value.counts) if isinstance(value, Series) else value
        )
        for found, points in registry.collect()
        if found is metric
        for labels, value in points
    }
