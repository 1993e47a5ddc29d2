"""compose.yaml is valid, and everything it names exists in the project. No container engine is needed."""

import importlib.resources
import importlib.util
import ipaddress
import itertools
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for

from sluice.grpc_server import CONNECTIONS_MAX
from sluice.settings import load
from sluice.telemetry.exporters import triton_endpoint
from sluice.tls import AUTHORITIES, CERTIFICATE, KEY
from tests.support.compose import (
    COMPOSE_FILES,
    FOLDER,
    compose,
    services,
    used_variables,
    variables,
)

PROCESSES = ("triton", "batcher", "gateway", "jobs")
"""Services that run our code."""


@cache
def compose_validator() -> Validator:
    # check-jsonschema carries the schema of the compose specification (Apache-2.0).
    vendored = importlib.resources.files("check_jsonschema") / "builtin_schemas/vendor"
    schema = json.loads((vendored / "compose-spec.json").read_text(encoding="utf-8"))
    validator = validator_for(schema)
    validator.check_schema(schema)
    return validator(schema)


def schema_problems(document: Any) -> list[str]:
    return [error.message for error in compose_validator().iter_errors(document)]


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_file_is_valid_by_the_official_schema(name: str) -> None:
    for document in (yaml.safe_load((FOLDER / name).read_text(encoding="utf-8")), compose(name)):
        assert schema_problems(document) == []


def test_every_variable_is_defined_and_used() -> None:
    texts = [(FOLDER / name).read_text(encoding="utf-8") for name in COMPOSE_FILES]
    used = set().union(*(used_variables(text) for text in texts))

    assert used == set(variables())


def test_only_gateway_and_jaeger_are_published_on_loopback() -> None:
    published = {
        name: service["ports"] for name, service in services().items() if "ports" in service
    }

    assert set(published) == {"gateway", "jaeger"}
    for port in itertools.chain(*published.values()):
        host, _, _ = port.rsplit(":", 2)
        assert ipaddress.ip_address(host).is_loopback


def test_nats_and_triton_are_on_the_inner_network_alone() -> None:
    networks = compose()["networks"]

    assert networks["mesh"]["internal"] is True
    assert services()["nats"]["networks"] == services()["triton"]["networks"] == ["mesh"]


def test_names_inside_the_file_exist() -> None:
    for service in services().values():
        assert set(service["networks"]) <= set(compose()["networks"])
        for other, dependency in service.get("depends_on", {}).items():
            assert dependency["condition"] == "service_healthy"
            assert "healthcheck" in services()[other]
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (FOLDER / source).is_file()
            else:
                assert source in compose()["volumes"]


def test_addresses_name_services_and_their_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in services()["gateway"]["environment"].items():
        monkeypatch.setenv(name, value)

    settings = load(FOLDER / "sluice.yaml")

    nats, triton, jaeger = (json.dumps(services()[name]) for name in ("nats", "triton", "jaeger"))
    nats_port = str(settings.nats.url).removeprefix("nats://nats:")
    assert f"--port={nats_port}" in nats
    assert f"--port={str(settings.triton.url).removeprefix('triton:')}" in triton
    assert f"127.0.0.1:{settings.gateway.address.removeprefix('0.0.0.0:')}" in json.dumps(
        services()["gateway"]
    )
    spans = services()["gateway"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
    assert f"0.0.0.0:{spans.removeprefix('http://jaeger:')}" in jaeger
    http = str(triton_endpoint(settings.telemetry.otlp_http_endpoint))
    assert http.endswith("/v1/traces")
    assert f"0.0.0.0:{http.removeprefix('http://jaeger:').removesuffix('/v1/traces')}" in jaeger


@pytest.mark.parametrize("name", PROCESSES)
def test_commands_name_modules_scripts_and_files_that_exist(name: str) -> None:
    service = services()[name]
    commands = [" ".join(service["command"]), " ".join(service["healthcheck"]["test"])]
    mounted = {volume.split(":")[1] for volume in service["volumes"]}

    for command in commands:
        for module in re.findall(r"-m (\w+)", command):
            assert importlib.util.find_spec(f"{module}.__main__") is not None, module
        for script in re.findall(r"/opt/sluice/(\S+\.py)", command):
            assert (FOLDER / script).is_file()
        for config in re.findall(r"--config[= ](\S+)", command):
            assert config in mounted


def test_proxy_passes_on_to_the_ports_of_the_gateway() -> None:
    text = (FOLDER / "nginx.conf").read_text(encoding="utf-8")
    (proxy,) = services("compose.proxy.yaml").values()
    ports = {port.rpartition(":")[2] for port in proxy["ports"]}
    assert set(re.findall(r"listen (\d+)", text)) == ports
    gateway = {variables()[name] for name in ("GATEWAY_PORT", "HTTP_PORT")}
    assert set(re.findall(r"gateway:(\d+);", text)) == gateway
    (limit,) = re.findall(r"limit_conn callers (\d+);", text)
    assert int(limit) <= CONNECTIONS_MAX // 4, "one address keeps no others out"


SECURE = "compose.secure.yaml"


@pytest.mark.parametrize("name", ["nats", "operator", *PROCESSES])
def test_each_process_has_a_certificate_of_its_own(name: str) -> None:
    secrets = compose(SECURE)["secrets"]
    folder = variables()["SECRETS_FOLDER"]
    files = {
        one["target"]: secrets[one["source"]]["file"]
        for one in services(SECURE)[name]["secrets"]
        if isinstance(one, dict)
    }
    assert files == {
        f"/etc/sluice-tls/{CERTIFICATE}": f"{folder}/{name}/{CERTIFICATE}",
        f"/etc/sluice-tls/{KEY}": f"{folder}/{name}/{KEY}",
        f"/etc/sluice-tls/{AUTHORITIES}": f"{folder}/{AUTHORITIES}",
    }


def test_passwords_are_files_that_settings_are_read_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gateway", "jobs"):
        service = services(SECURE)[name]
        passwords = [one for one in service["secrets"] if isinstance(one, str)]
        environment = {**services()[name]["environment"], **service["environment"]}
        assert environment["SLUICE_SECRETS"] == "/run/secrets"  # where compose puts them
        assert not set(passwords) & set(environment)
        for key, value in {**environment, "SLUICE_SECRETS": str(tmp_path)}.items():
            monkeypatch.setenv(key, value)
        for secret in passwords:
            (tmp_path / secret).write_text(f"0123456789abcdef of {secret}".replace(" ", "-"))
        settings = load(FOLDER / "sluice.yaml")
        assert settings.identity.api_keys
        assert settings.identity.mesh_key == "0123456789abcdef-of-SLUICE_IDENTITY__MESH_KEY"
        assert not settings.gateway.allow_remote
        assert str(settings.nats.url).startswith("tls://nats:")
