"""The section `identity`: who may call, and as whom.

Without it calls are not authenticated (docs/operate/security.md).
"""

from typing import ClassVar, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from sluice.defaults import CALLER
from sluice.settings.base import Name, Section

Role = Literal["caller", "operator", "auditor"]
ALGORITHMS: Final = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
)  # fmt: skip
"""Signatures that the public keys of a JWKS check. HS256 and "none" are not among them: what checks such a token could
also make it, or nothing checks it."""


class JwtSettings(Section):
    """One issuer of JSON Web Tokens."""

    issuer: str = Field(min_length=1)
    """The claim `iss`, letter for letter."""
    audience: str = Field(min_length=1)
    """What the claim `aud` must name: this mesh."""
    jwks: str = Field(min_length=1)
    """The issuer's keys (RFC 7517): a file, or an https URL. Read again every 5 minutes, and for a key it lacks."""
    tenant_claim: str = "tenant"
    """The claim that names the tenant."""
    roles_claim: str = "roles"
    """The claim with roles, a list or words with spaces between them; without it the role is "caller"."""
    leeway_s: ClassVar[float] = 30.0
    """How far the clocks of issuer and gateway may be apart, in seconds."""

    @field_validator("jwks")
    @classmethod
    def _encrypted(cls, jwks: str) -> str:
        url = urlsplit(jwks)
        local = url.hostname in ("localhost", "127.0.0.1", "::1")
        if url.scheme in ("http", "https") and not (url.scheme == "https" or local):
            raise ValueError("use https: who changes these keys on their way makes any token")
        return jwks

    @property
    def is_url(self) -> bool:
        """Whether the keys are fetched."""
        return self.jwks.startswith(("https://", "http://"))


class CertificateIdentity(Section):
    """Whose calls a client certificate makes."""

    tenant: Name
    """Tenant of the calls."""
    roles: tuple[Role, ...] = (CALLER,)
    """Roles of the calls: caller, operator, auditor."""


class IdentitySettings(Section):
    """Who may call; with any of the three set every call but those of the health service must say who it is."""

    api_keys: bool = False
    """Keys of `sluice keys`."""
    jwt: tuple[JwtSettings, ...] = ()
    """Issuers of JSON Web Tokens that are accepted."""
    certificates: dict[str, CertificateIdentity] = Field(default_factory=dict)
    """Client certificates by a subject alternative name, such as `spiffe://example.org/team-a`."""
    mesh_key: str | None = Field(None, pattern=r"^[!-~]{16,}$", repr=False)
    """What processes of the mesh show each other, a secret; unset: the first makes it, and JetStream keeps it. An
    embedded mesh has one in its state directory."""

    @model_validator(mode="after")
    def _issuers_differ(self) -> Self:
        issuers = [one.issuer for one in self.jwt]
        if len(set(issuers)) != len(issuers):
            raise ValueError("jwt: two entries have the same issuer")
        return self

    @property
    def enabled(self) -> bool:
        """Whether calls are authenticated."""
        return self.api_keys or bool(self.jwt) or bool(self.certificates)
