"""The manifests are valid, and say the same as compose.yaml."""

import shutil
import subprocess
import warnings
from typing import Any

import pytest
import yaml

from sluice.settings import load
from tests.support.compose import FOLDER, ROOT, manifests, pod_containers, services, variables

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of pkg_resources-style imports inside
    import kubernetes_validate

KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))
OURS = ("triton", "batcher", "gateway")


@pytest.mark.parametrize(
    "manifest", manifests(), ids=lambda m: f"{m['kind']}-{m['metadata']['name']}"
)
def test_manifest_is_valid_by_the_schema_of_kubernetes(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, "1.33", strict=True)


def test_the_schema_would_see_a_wrong_key() -> None:
    wrong = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"port": 1}}

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.33", strict=True)


def test_every_manifest_is_part_of_the_kustomization() -> None:
    files = {f"kubernetes/{path.name}" for path in (FOLDER / "kubernetes").iterdir()}

    assert files == {*KUSTOMIZATION["resources"], "kubernetes/gpu.patch.yaml"}


def test_workloads_are_those_of_compose() -> None:
    assert set(pod_containers()) == set(services())


@pytest.mark.parametrize("name", services())
def test_images_and_commands_are_those_of_compose(name: str) -> None:
    container, service = pod_containers()[name], services()[name]

    assert container["image"] == service["image"]
    if name in OURS:
        assert container["command"] == service["command"]
        assert any(image["name"] == service["image"] for image in KUSTOMIZATION["images"])
    elif name == "nats":
        assert container["args"] == service["command"]


def test_addresses_are_those_of_compose() -> None:
    (literals,) = (
        generator["literals"]
        for generator in KUSTOMIZATION["configMapGenerator"]
        if generator["name"] == "sluice-addresses"
    )

    addresses = dict(literal.split("=", 1) for literal in literals)

    assert addresses == services()["gateway"]["environment"]


def test_each_model_has_a_standby_in_another_pod() -> None:
    settings, single = (load(FOLDER / name) for name in ("sluice.cluster.yaml", "sluice.yaml"))
    (triton,) = (
        m for m in manifests() if m["kind"] == "StatefulSet" and m["metadata"]["name"] == "triton"
    )
    pods = [
        f"triton-{n}.{triton['spec']['serviceName']}:8001"
        for n in range(triton["spec"]["replicas"])
    ]
    for model, same in zip(settings.models, single.models, strict=True):
        assert (list(model.triton_urls), model.standby) == (pods, 1)
        assert model.model_copy(update={"triton_url": None, "standby": 0}) == same
    assert settings.model_copy(update={"models": single.models}) == single


def test_services_have_the_ports_that_the_addresses_name() -> None:
    ports = {
        item["metadata"]["name"]: {str(port["port"]) for port in item["spec"]["ports"]}
        for item in manifests()
        if item["kind"] == "Service"
    }
    names = {
        "nats": {"NATS_PORT"},
        "triton": {"TRITON_GRPC_PORT"},
        "gateway": {"GATEWAY_PORT"},
        "jaeger": {"OTLP_GRPC_PORT", "OTLP_HTTP_PORT", "JAEGER_UI_PORT"},
    }

    assert ports == {
        service: {variables()[name] for name in wanted} for service, wanted in names.items()
    }


@pytest.mark.parametrize("name", services())
def test_every_container_has_probes_and_a_memory_limit(name: str) -> None:
    container = pod_containers()[name]

    assert {"livenessProbe"} <= set(container)
    assert {"readinessProbe", "startupProbe"} & set(container)
    assert "memory" in container["resources"]["limits"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_gpu_patch_names_the_container_it_patches() -> None:
    patch = yaml.safe_load((FOLDER / "kubernetes/gpu.patch.yaml").read_text(encoding="utf-8"))

    (container,) = patch["spec"]["template"]["spec"]["containers"]

    assert container["name"] in pod_containers()


def test_kubectl_builds_the_kustomization() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")

    result = subprocess.run(
        ["kubectl", "kustomize", "compose"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )

    assert result.returncode == 0, result.stderr
    kinds = [document["kind"] for document in yaml.safe_load_all(result.stdout)]
    assert kinds.count("Deployment") == 3
    assert kinds.count("ConfigMap") == 2
