"""The collector that samples traces: its configuration is complete, and keeps errors and slow requests."""

import re
from typing import Any

import pytest
import yaml
from jsonschema.validators import validator_for

from tests.support.compose import FOLDER, services

TEXT = (FOLDER / "collector.yaml").read_text(encoding="utf-8")
SAMPLING = "compose.sampling.yaml"
DURATION = {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"}
COUNT = {"type": "integer", "minimum": 1}


def exactly(**properties: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name != "decision_cache"],
        "additionalProperties": False,
    }


def policy(kind: str, **properties: object) -> dict[str, object]:
    return exactly(name={"type": "string"}, type={"const": kind}, **{kind: exactly(**properties)})


STATUS = {"type": "array", "minItems": 1, "items": {"enum": ["ERROR", "OK", "UNSET"]}}
PERCENT = {"type": "number", "minimum": 0, "maximum": 100}
TAIL_SAMPLING = exactly(
    decision_wait=DURATION,
    decision_wait_after_root_received=DURATION,
    num_traces=COUNT,
    decision_cache=exactly(sampled_cache_size=COUNT, non_sampled_cache_size=COUNT),
    policies={
        "type": "array",
        "items": {
            "oneOf": [
                policy("status_code", status_codes=STATUS),
                policy("latency", threshold_ms=COUNT),
                policy("probabilistic", sampling_percentage=PERCENT),
            ]
        },
    },
)
"""What tailsamplingprocessor of opentelemetry-collector-contrib 0.144 and later takes, as far as it is used here."""


def environment() -> dict[str, str]:
    found = services(SAMPLING)["jaeger"]["environment"]
    return {name: str(value) for name, value in found.items()}


def collector(values: dict[str, str]) -> dict[str, Any]:
    """The configuration as the collector reads it: a value that is a variable has the type that YAML gives its text."""
    quoted = re.sub(r'"(\$\{env:[A-Z_]+\})"', r"\1", TEXT)
    found = yaml.safe_load(re.sub(r"\$\{env:([A-Z_]+)\}", lambda one: values[one[1]], quoted))
    assert isinstance(found, dict)
    return found


def problems(sampling: object) -> list[str]:
    validator = validator_for(TAIL_SAMPLING)
    validator.check_schema(TAIL_SAMPLING)
    return [error.message for error in validator(TAIL_SAMPLING).iter_errors(sampling)]


def test_the_processor_takes_it() -> None:
    sampling = collector(environment())["processors"]["tail_sampling"]
    assert problems(sampling) == []
    assert problems({**sampling, "policys": []})
    wrong = {"name": "slow", "type": "latency", "latency": {"threshold": 1}}
    assert problems({**sampling, "policies": [wrong]})


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
