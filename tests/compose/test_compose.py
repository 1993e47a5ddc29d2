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
from tests.support.compose import (
    COMPOSE_FILES,
    FOLDER,
    compose,
    services,
    used_variables,
    variables,
)


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
