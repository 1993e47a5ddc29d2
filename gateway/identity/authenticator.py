"""Authenticate calls over gRPC and HTTP by their metadata and the certificate of the connection.

Accepted credentials are cached by hash, so the next call with one costs a lookup. Whatever may invalidate them clears
the cache: a change of keys or of settings. The expiry of a token is cached with it.

New settings take effect in two steps: `prepare` reads their keys and may fail, `use` cannot.
"""

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from nats.aio.client import Client

from gateway.identity import credentials
from gateway.identity.caller import Caller
from gateway.identity.key_sources import AGAIN_S, IssuerKeys, KeyBucket
from sluice.defaults import KEY_METADATA, TENANT_METADATA
from sluice.errors import InvalidRequest, PermissionDenied, Unauthenticated
from sluice.internal.v1.identity_pb2 import ApiKeyRecord
from sluice.settings import IdentitySettings
from sluice.wire.api_keys import PREFIX
from sluice.wire.subjects import is_token

AUTHORIZATION: Final = "authorization"
_BEARER: Final = "bearer "
DEFAULT_TENANT: Final = "default"
CACHED_MAX: Final = 16_384
"""Most cached credentials; the oldest are evicted."""


@dataclass(frozen=True)
class Identities:
    """Identity settings with the keys that they name."""

    settings: IdentitySettings
    issuers: Mapping[str, IssuerKeys]
    bucket: KeyBucket | None

    @property
    def records(self) -> Mapping[str, ApiKeyRecord]:
        """Records of API keys by id."""
        return {} if self.bucket is None else self.bucket.records

    @property
    def digests(self) -> list[str]:
        """Digests of the key files, which must be the same at every gateway."""
        return [keys.digest for keys in self.issuers.values() if not keys.settings.is_url]

    async def run(self) -> None:
        """Keep the keys up to date until cancelled."""
        sources = (*self.issuers.values(), self.bucket)
        await asyncio.gather(*(source.run() for source in sources if source is not None))


class Authenticator:
    """The authenticator of a gateway.

    Attributes:
        on: Whether calls need credentials.
        takes_certificates: Whether `caller_of` needs the names in the client's certificate.
        mesh_key: Credential of other processes of the mesh.
        identities: Settings and keys in use.
    """

    def __init__(
        self,
        settings: IdentitySettings,
        replicas: int = 1,
        unix_time: Callable[[], float] = time.time,
        again_s: float = AGAIN_S,
        cached_max: int = CACHED_MAX,
    ) -> None:
        """Prepare to authenticate calls; `unix_time` returns the time, `again_s` is passed to `IssuerKeys`."""
        self.on = settings.enabled
        self.mesh_key = settings.mesh_key
        self._replicas = replicas
        self._time = unix_time
        self._again_s, self._cached_max = again_s, cached_max
        self._cache: dict[bytes, tuple[Caller, float]] = {}
        self._client: Client | None = None
        self._replaced = asyncio.Event()
        self.use(Identities(settings, {}, None))

    async def start(self, client: Client) -> None:
        """Read all keys; raise as `prepare`."""
        self._client = client
        self.use(await self.prepare(self.identities.settings))

    async def prepare(self, settings: IdentitySettings) -> Identities:
        """Read all keys that `settings` name, and return what `use` takes.

        Keys of unchanged issuers, and API keys, are those in force: what is read of them takes effect at once.

        Raises:
            SettingsError: A key file is invalid.
            TransportUnavailable, nats.errors.Error: JetStream does not answer.
        """
        before, clear_cache = self.identities, self._cache.clear
        issuers, bucket = dict[str, IssuerKeys](), None
        for number, issuer in enumerate(settings.jwt):
            keys = before.issuers.get(issuer.issuer)
            if keys is None or keys.settings != issuer:
                keys = IssuerKeys(
                    issuer, f"identity.jwt.{number}", clear_cache, again_s=self._again_s
                )
            issuers[issuer.issuer] = keys
            await keys.start()
        if settings.api_keys:
            bucket = before.bucket or KeyBucket(self._replicas, clear_cache)
            if self._client is not None:
                await bucket.start(self._client)
        return Identities(settings, issuers, bucket)

    def use(self, identities: Identities) -> None:
        """Authenticate later calls by `identities`."""
        self.identities = identities
        self.takes_certificates = bool(identities.settings.certificates)
        self._cache.clear()
        self._replaced.set()

    async def run(self) -> None:
        """Keep the keys up to date until cancelled."""
        while True:
            self._replaced.clear()
            async with asyncio.TaskGroup() as group:
                running = group.create_task(self.identities.run())
                await self._replaced.wait()
                running.cancel()

    async def refresh_keys(self) -> None:
        """Read the API keys again if they have changed; raise TransportUnavailable if JetStream does not answer."""
        if self.identities.bucket is not None:
            await self.identities.bucket.refresh()

    async def caller_of(
        self, metadata: Mapping[str, str], certificate_names: Collection[str] = ()
    ) -> Caller:
        """Return the caller with these credentials.

        Args:
            metadata: Metadata of a gRPC call, or headers of an HTTP request with names in lower case.
            certificate_names: Subject alternative names of a verified client certificate.

        Raises:
            Unauthenticated: Credentials are missing, invalid, expired or revoked.
            PermissionDenied: The metadata names another tenant.
            InvalidRequest: The metadata names an invalid tenant.
            TransportUnavailable: The keys of the token's issuer could not be fetched yet.
        """
        if not self.on:
            return trusted_caller(metadata.get(TENANT_METADATA, DEFAULT_TENANT))
        header = metadata.get(AUTHORIZATION, "")
        if not header:
            return _checked_tenant(self._of_certificate(certificate_names), metadata)
        digest = hashlib.sha256(header.encode()).digest()
        cached = self._cache.get(digest)
        if cached is None or cached[1] <= self._time():
            if header[: len(_BEARER)].lower() != _BEARER:
                raise Unauthenticated.of(
                    "CREDENTIALS_MISSING",
                    "authorization: must be 'Bearer ' and an API key or a token",
                )
            credential = header[len(_BEARER) :].strip()
            # Not cached: the key of the mesh is the same for all tenants, which the metadata name.
            mesh_key = self.mesh_key
            if mesh_key is not None and hmac.compare_digest(credential.encode(), mesh_key.encode()):
                # A process that calls on behalf of a tenant; `of_item` checks the key of its job.
                caller = trusted_caller(metadata.get(TENANT_METADATA, DEFAULT_TENANT))
                return replace(caller, key_id=metadata.get(KEY_METADATA, ""))
            identities, cached = self.identities, await self._verify(credential)
            while identities is not self.identities:  # reloaded while keys of an issuer were read
                identities, cached = self.identities, await self._verify(credential)
            if len(self._cache) >= self._cached_max:
                del self._cache[next(iter(self._cache))]
            self._cache[digest] = cached
        return _checked_tenant(cached[0], metadata)

    def of_item(self, caller: Caller) -> Caller:
        """Return `caller`, a process of the mesh, with the current limits of its job's API key.

        Raises:
            Unauthenticated: The key was revoked, has expired, or is gone.
        """
        if not self.on or not caller.key_id:
            return caller
        records = self.identities.records
        current = credentials.caller_of_id(caller.key_id, caller.tenant, records, self._time())
        return replace(caller, key_limits=current.key_limits)

    async def _verify(self, credential: str) -> tuple[Caller, float]:
        """Return the caller with this API key or token, and when it expires."""
        if credential.startswith(PREFIX):
            return credentials.caller_of_key(credential, self.identities.records, self._time())
        issuer = self.identities.issuers.get(credentials.issuer_of(credential))
        if issuer is None:
            raise Unauthenticated.of(
                "TOKEN_INVALID", "the token is of an issuer that is not in identity.jwt"
            )
        try:
            return credentials.caller_of_token(
                credential, issuer.settings, issuer.keys, self._time()
            )
        except (
            credentials.KeyMissing
        ):  # the issuer may have rotated its keys: read them, and try once more
            await issuer.refresh()
        return credentials.caller_of_token(credential, issuer.settings, issuer.keys, self._time())

    def _of_certificate(self, names: Collection[str]) -> Caller:
        for name in names:
            identity = self.identities.settings.certificates.get(name)
            if identity is not None:
                return Caller(identity.tenant, frozenset(identity.roles))
        if names and self.takes_certificates:
            raise Unauthenticated.of(
                "CERTIFICATE_UNKNOWN",
                f"no name of the client certificate is in identity.certificates: {', '.join(names)}",
            )
        raise Unauthenticated.of(
            "CREDENTIALS_MISSING",
            "this mesh requires credentials: send an API key (SLUICE_API_KEY, api_key= of the client, or the header "
            "'authorization: Bearer ...')",
        )


@lru_cache(CACHED_MAX)
def trusted_caller(tenant: str = DEFAULT_TENANT) -> Caller:
    """Return a caller with all roles: of a mesh without credentials, or another process of the mesh.

    Raises:
        InvalidRequest: It is no name of a tenant.
    """
    if not is_token(tenant):
        raise InvalidRequest.of(
            f"metadata.{TENANT_METADATA}", "must be 1 to 64 letters, digits, '-' and '_'"
        )
    return Caller(tenant)


def _checked_tenant(caller: Caller, metadata: Mapping[str, str]) -> Caller:
    """Return `caller`; raise PermissionDenied if the metadata names another tenant."""
    named = metadata.get(TENANT_METADATA)
    if named is not None and named != caller.tenant:
        raise PermissionDenied(
            f"{TENANT_METADATA}: the credentials are of tenant {caller.tenant!r}; send that name or none"
        )
    return caller
