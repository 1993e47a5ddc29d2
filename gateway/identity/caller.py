"""The identity of a call, and what it may do."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from sluice.defaults import AUDITOR, CALLER, OPERATOR, ROLES, TENANT_METADATA
from sluice.errors import InvalidRequest, PermissionDenied
from sluice.settings.limits import RateLimits
from sluice.wire.subjects import is_token

MESH: Final = "mesh"
"""The role of other processes of the mesh, which call for tenants."""
ANY: Final = frozenset({*ROLES, MESH})


_UNLIMITED: Final = RateLimits()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls.

    Attributes:
        tenant: whose call it is.
        roles: "caller" asks models and has jobs; "operator" runs the mesh and reads and changes what tenants have;
            "auditor" reads it.
        key_id: of the API key; empty for other identities.
        key_limits: of the API key.
    """

    tenant: str
    roles: frozenset[str] = ANY
    key_id: str = ""
    key_limits: RateLimits = _UNLIMITED

    @property
    def reads(self) -> str | None:
        """The one tenant whose data it may read; None: every tenant's."""
        return None if self.roles & {OPERATOR, AUDITOR} else self.tenant

    @property
    def changes(self) -> str | None:
        """The one tenant whose data it may change; None: every tenant's."""
        return None if OPERATOR in self.roles else self.tenant

    def require(self, roles: Collection[str], what: str) -> None:
        """Raises PermissionDenied without one of ``roles``; ``what`` names the call."""
        if self.roles.isdisjoint(roles):
            needed = " or ".join(role for role in ROLES if role in roles) or "of the mesh itself"
            has = ", ".join(sorted(self.roles)) or "none"
            raise PermissionDenied(
                f"{what} needs the role {needed}; this identity of tenant {self.tenant} has: {has}"
            )


def roles_for(method: str) -> frozenset[str]:
    """The roles that may call ``method``, "/package.Service/Method"; an unknown one is for operators."""
    service = method.rpartition("/")[0].removeprefix("/")
    return _BY_METHOD.get(method) or _BY_SERVICE.get(service) or frozenset({OPERATOR})


ASKS: Final = frozenset({CALLER, MESH})
"""Who may ask models."""
_READERS: Final = frozenset({OPERATOR, AUDITOR, MESH})
CHANGES: Final = frozenset({CALLER, OPERATOR, MESH})
"""Who may change what a tenant has."""
_BY_SERVICE: Final = {
    "sluice.v1.InferenceService": ASKS,
    "sluice.v1.SafetyService": ASKS,
    "sluice.v1.AdminService": frozenset({OPERATOR, MESH}),
    "sluice.v1.JobService": CHANGES,
    "sluice.internal.v1.ItemsService": frozenset({MESH}),
    "grpc.reflection.v1.ServerReflection": ANY,
    "grpc.reflection.v1alpha.ServerReflection": ANY,
}


def methods_of(service: str, names: str) -> frozenset[str]:
    """The methods of ``names``, words, as gRPC calls them: "/package.Service/Method"."""
    return frozenset(f"/sluice.v1.{service}/{name}" for name in names.split())


JOB_READS: Final = methods_of(
    "JobService", "GetJob GetUpload ListUploads ListJobs WatchJob GetResults ListDeadLetters"
)
"""Methods of jobs that change nothing."""
_OWN_OR_ALL: Final = methods_of(
    "AdminService", "ListRequests ListTenants GetRequestRecord GetAuditEntry StreamOutcomes"
)
"""They answer a caller with what is its tenant's."""
_BY_METHOD: Final = {
    "/sluice.v1.InferenceService/ListModels": ANY,
    "/sluice.v1.SafetyService/GetDryRun": _READERS,
    "/sluice.v1.AdminService/GetRouterHealth": _READERS,
    "/sluice.v1.AdminService/ReadMetrics": _READERS,
    "/sluice.v1.AdminService/SubmitFeedback": CHANGES,
    **dict.fromkeys(_OWN_OR_ALL, ANY),
    "/sluice.v1.JobService/CreateJob": ASKS,
    "/sluice.v1.JobService/UploadInput": ASKS,
    **dict.fromkeys(JOB_READS, ANY),
}

DEFAULT_TENANT: Final = "default"


def tenant_of(metadata: Mapping[str, str]) -> str:
    """The tenant that pays for a call: the one its metadata names, else "default".

    Raises:
        InvalidRequest: the metadata holds no valid name.
    """
    name = metadata.get(TENANT_METADATA, DEFAULT_TENANT)
    if not is_token(name):
        raise InvalidRequest.of(
            f"metadata.{TENANT_METADATA}", "must be 1 to 64 letters, digits, '-' and '_'"
        )
    return name
