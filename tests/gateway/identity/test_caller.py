"""What a caller may call, read and change."""

import re
from pathlib import Path

import pytest

from gateway.identity.authenticator import trusted_caller
from gateway.identity.caller import ANY, Caller, roles_for
from sluice.errors import InvalidRequest

PROTOS = Path(__file__).parents[3] / "protos"
ANSWERED = {"InferenceService", "SafetyService", "AdminService", "JobService", "ItemsService"}
"""Services that gateways have."""


def methods() -> list[str]:
    """Every method of them that the protos have."""
    found = []
    for path in sorted(PROTOS.rglob("*.proto")):
        text = path.read_text(encoding="utf-8")
        package = re.findall(r"^package ([\w.]+);", text, re.MULTILINE)[0]
        for service, body in re.findall(
            r"^service (\w+) \{(.*?)^\}", text, re.MULTILINE | re.DOTALL
        ):
            if service in ANSWERED:
                names = re.findall(r"^  rpc (\w+)", body, re.MULTILINE)
                found += [f"/{package}.{service}/{name}" for name in names]
    return found


@pytest.mark.parametrize(
    "method",
    [
        "/sluice.v1.NewService/Anything",
        "/sluice.v1.inferenceservice/Generate",
        "/sluice.v2.InferenceService/Generate",
        "/InferenceService/Generate",
        "/grpc.health.v1.Health/Check",
        "sluice.v1.InferenceService",
        "/",
        "",
    ],
)
def test_a_method_that_nobody_listed_is_for_operators(method: str) -> None:
    assert roles_for(method) == {"operator"}


READS = {
    "GetJob",
    "GetUpload",
    "ListUploads",
    "ListJobs",
    "WatchJob",
    "GetResults",
    "ListDeadLetters",
}
OWN_OR_ALL = {"ListRequests", "ListTenants", "GetRequestRecord", "GetAuditEntry", "StreamOutcomes"}


def test_roles_of_every_method() -> None:
    """Who asks models changes nothing for operators; who reads changes nothing at all."""
    asks, reads = {"caller", "mesh"}, {"operator", "auditor", "mesh"}
    changes, everybody = {"caller", "operator", "mesh"}, set(ANY)
    found = methods()
    assert len(found) > 30
    for method in found:
        service, name = method.split(".")[-1].split("/")
        if service in {"InferenceService", "SafetyService"}:
            expected = {"ListModels": everybody, "GetDryRun": reads}.get(name, asks)
        elif service == "AdminService":
            expected = {
                **dict.fromkeys(OWN_OR_ALL, everybody),
                **dict.fromkeys(("GetRouterHealth", "ReadMetrics"), reads),
                "SubmitFeedback": changes,
            }.get(name, {"operator", "mesh"})
        elif service == "JobService":
            expected = {
                **dict.fromkeys(READS, everybody),
                **dict.fromkeys(("CreateJob", "UploadInput"), asks),
            }.get(name, changes)
        else:
            expected = {"mesh"}
        assert roles_for(method) == expected, method


@pytest.mark.parametrize(
    ("roles", "reads", "changes"),
    [
        (["caller"], "acme", "acme"),
        (["auditor"], None, "acme"),
        (["operator"], None, None),
        (["caller", "auditor"], None, "acme"),
        ([], "acme", "acme"),
        (["mesh"], "acme", "acme"),
    ],
)
def test_whose_data_it_reads_and_changes(
    roles: list[str], reads: str | None, changes: str | None
) -> None:
    caller = Caller("acme", frozenset(roles))
    assert (caller.readable_tenant, caller.writable_tenant) == (reads, changes)


def test_without_the_role_the_error_names_it() -> None:
    caller = Caller("acme", frozenset({"auditor", "caller"}))
    assert caller.refusal({"operator", "mesh"}, "draining").message == (
        "draining requires the role operator; this identity of tenant acme has: auditor, caller"
    )
    refusal = Caller("acme", frozenset()).refusal({"mesh"}, "this")
    assert refusal.message.startswith("this requires the role of the mesh itself; ")
    assert refusal.message.endswith(" has: none")


@pytest.mark.parametrize("name", ["a", "A-b_9", "x" * 64])
def test_names_of_tenants(name: str) -> None:
    assert trusted_caller(name).tenant == name
    assert trusted_caller().tenant == "default"


@pytest.mark.parametrize("name", ["", "x" * 65, "a b", "a.b", "a/b", "a\n", "é", "*", ">"])
def test_what_is_no_name_of_a_tenant(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        trusted_caller(name)
    assert [one.field for one in refused.value.violations] == ["metadata.sluice-tenant"]
