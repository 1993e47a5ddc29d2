"""The identity of a caller, its roles, and which methods each role may call."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from sluice.defaults import AUDITOR, CALLER, OPERATOR, ROLES
from sluice.errors import PermissionDenied
from sluice.settings.limits import RateLimits

MESH: Final = "mesh"
"""Role of other processes of the mesh, which call on behalf of tenants."""
ANY: Final = frozenset({*ROLES, MESH})
"""All roles."""


_UNLIMITED: Final = RateLimits()


@dataclass(frozen=True, slots=True)
class Caller:
    """The identity of a caller.

    Attributes:
        tenant: Tenant that pays for the call.
        roles: "caller" uses models and jobs; "operator" runs the mesh, and reads and changes the data of all tenants;
            "auditor" reads it.
        key_id: Id of the API key; empty for other identities.
        key_limits: Limits of the API key.
    """

    tenant: str
    roles: frozenset[str] = ANY
    key_id: str = ""
    key_limits: RateLimits = _UNLIMITED

    @property
    def readable_tenant(self) -> str | None:
        """Only tenant whose data the caller may read; None: all tenants."""
        return None if self.roles & {OPERATOR, AUDITOR} else self.tenant

    @property
    def writable_tenant(self) -> str | None:
        """Only tenant whose data the caller may change; None: all tenants."""
        return None if OPERATOR in self.roles else self.tenant

    def refusal(self, roles: Collection[str], what: str) -> PermissionDenied:
        """Return the error of a caller that has none of `roles`; `what` names the call."""
        required = " or ".join(role for role in ROLES if role in roles) or "of the mesh itself"
        present = ", ".join(sorted(self.roles)) or "none"
        return PermissionDenied(
            f"{what} requires the role {required}; this identity of tenant {self.tenant} has: {present}"
        )


def roles_for(method: str) -> frozenset[str]:
    """Return the roles that may call `method`, "/package.Service/Method"; operators alone if it is unknown."""
    service = method.rpartition("/")[0].removeprefix("/")
    return _BY_METHOD.get(method) or _BY_SERVICE.get(service) or frozenset({OPERATOR})


CALLERS: Final = frozenset({CALLER, MESH})
"""Roles that may use models."""
_READERS: Final = frozenset({OPERATOR, AUDITOR, MESH})
CHANGES: Final = frozenset({CALLER, OPERATOR, MESH})
"""Roles that may change the data of their tenant."""
_BY_SERVICE: Final = {
    "sluice.v1.InferenceService": CALLERS,
    "sluice.v1.SafetyService": CALLERS,
    "sluice.v1.AdminService": frozenset({OPERATOR, MESH}),
    "sluice.v1.JobService": CHANGES,
    "sluice.internal.v1.ItemsService": frozenset({MESH}),
    "grpc.reflection.v1.ServerReflection": ANY,
    "grpc.reflection.v1alpha.ServerReflection": ANY,
}


def methods_of(service: str, names: str) -> frozenset[str]:
    """Return the full names, "/package.Service/Method", of methods in a list of words."""
    return frozenset(f"/sluice.v1.{service}/{name}" for name in names.split())


JOB_READS: Final = methods_of(
    "JobService", "GetJob GetUpload ListUploads ListJobs WatchJob GetResults ListDeadLetters"
)
"""Methods of JobService that only read."""
_OWN_OR_ALL: Final = methods_of(
    "AdminService", "ListRequests ListTenants GetRequestRecord GetAuditEntry StreamOutcomes"
)
"""Methods that return only the data of the caller's tenant, unless its roles may read all."""
_BY_METHOD: Final = {
    "/sluice.v1.InferenceService/ListModels": ANY,
    "/sluice.v1.SafetyService/GetDryRun": _READERS,
    "/sluice.v1.AdminService/GetRouterHealth": _READERS,
    "/sluice.v1.AdminService/ReadMetrics": _READERS,
    "/sluice.v1.AdminService/SubmitFeedback": CHANGES,
    **dict.fromkeys(_OWN_OR_ALL, ANY),
    "/sluice.v1.JobService/CreateJob": CALLERS,
    "/sluice.v1.JobService/UploadInput": CALLERS,
    **dict.fromkeys(JOB_READS, ANY),
}
