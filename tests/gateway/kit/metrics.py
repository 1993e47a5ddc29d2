"""What an in-memory reader of metrics holds."""

from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader

Labels = frozenset[tuple[str, object]]


def values(reader: InMemoryMetricReader, name: str) -> dict[Labels, float]:
    """The values of an instrument now, by their labels; of a histogram its counts."""
    data = reader.get_metrics_data()
    if data is None:
        return {}
    found = {}
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points if metric.name == name else ():
                    count = point.count if isinstance(point, HistogramDataPoint) else point.value
                    found[frozenset((point.attributes or {}).items())] = count
    return found
