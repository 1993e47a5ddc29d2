"""The collector that samples traces: its configuration is complete, and keeps errors and slow requests."""

import re
from typing import Any

import pytest
import yaml

from tests.support.compose import FOLDER, services

TEXT = (FOLDER / "collector.yaml").read_text(encoding="utf-8")
SAMPLING = "compose.sampling.yaml"


def environment() -> dict[str, str]:
    found = services(SAMPLING)["jaeger"]["environment"]
    return {name: str(value) for name, value in found.items()}


def collector(values: dict[str, str]) -> dict[str, Any]:
    """The configuration as the collector reads it: a value that is a variable has the type that YAML gives its text."""
    quoted = re.sub(r'"(\$\{env:[A-Z_]+\})"', r"\1", TEXT)
    found = yaml.safe_load(re.sub(r"\$\{env:([A-Z_]+)\}", lambda one: values[one[1]], quoted))
    assert isinstance(found, dict)
    return found


def test_what_the_service_names_is_configured() -> None:
    config = collector(environment())
    service = config["service"]
    assert set(service["extensions"]) == set(config["extensions"])
    (pipeline,) = service["pipelines"].values()
    for part in ("receivers", "processors", "exporters"):
        assert set(pipeline[part]) == set(config[part])
    (storage,) = config["extensions"]["jaeger_storage"]["backends"]
    assert config["extensions"]["jaeger_query"]["storage"]["traces"] == storage
    assert config["exporters"]["jaeger_storage_exporter"]["trace_storage"] == storage


@pytest.mark.parametrize("percent", ["0", "10", "0.5"])
def test_errors_and_slow_requests_are_always_sampled(percent: str) -> None:
    values = {**environment(), "TRACES_KEPT_PERCENT": percent}
    sampling = collector(values)["processors"]["tail_sampling"]
    policies = {one["type"]: one[one["type"]] for one in sampling["policies"]}
    assert policies == {
        "status_code": {"status_codes": ["ERROR"]},
        "latency": {"threshold_ms": int(values["TRACES_SLOW_MS"])},
        "probabilistic": {"sampling_percentage": float(percent)},
    }
