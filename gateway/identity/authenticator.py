"""Who calls, by the metadata of the call and the certificate of the connection; the same for gRPC and HTTP.

A credential that was accepted is remembered by its hash, so the next call with it costs a lookup. Everything that may
make it invalid empties the memory: a change of the keys, other settings. A token's end is remembered with it.

Other settings are taken in two steps: `prepare` reads their keys and may fail, `use` cannot.
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

from gateway.identity.caller import Caller, tenant_of
from gateway.identity.credentials import (
    KeyMissing,
    caller_of_id,
    caller_of_key,
    caller_of_token,
    issuer_of,
)
from gateway.identity.key_sources import IssuerKeys, KeyBucket
from sluice.defaults import KEY_METADATA, TENANT_METADATA
from sluice.errors import PermissionDenied, Unauthenticated
from sluice.settings import IdentitySettings
from sluice.wire.api_keys import PREFIX

AUTHORIZATION: Final = "authorization"
_BEARER: Final = "bearer "
KNOWN_MAX: Final = 16_384
"""Credentials that are remembered; the oldest make room."""


@dataclass(frozen=True)
class Identities:
    """Settings with the keys that they name."""

    settings: IdentitySettings
    issuers: Mapping[str, IssuerKeys]
    bucket: KeyBucket | None

    @property
    def digests(self) -> list[str]:
        """Of the files of keys; every gateway must have the same ones."""
        return [one.digest for one in self.issuers.values() if not one.settings.is_url]

    async def run(self) -> None:
        """Keeps the keys up to date, until it is cancelled."""
        sources = (*self.issuers.values(), self.bucket)
        await asyncio.gather(*(one.run() for one in sources if one is not None))


class Authenticator:
    """Tells who calls a gateway.

    Attributes:
        on: whether calls must say who they are.
        takes_certificates: whether `caller_of` needs the names in the client's certificate.
        mesh_key: what processes of the mesh show.
    """

    def __init__(
        self,
        settings: IdentitySettings,
        replicas: int = 1,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self.on = settings.enabled
        self.mesh_key = settings.mesh_key
        self._replicas = replicas
        self._time = unix_time
        self._known: dict[bytes, tuple[Caller, float]] = {}
        self._client: Client | None = None
        self._replaced = asyncio.Event()
        self.use(Identities(settings, {}, None))

    async def start(self, client: Client) -> None:
        """Reads keys of all kinds; raises as `prepare`."""
        self._client = client
        self.use(await self.prepare(self._identities.settings))

    async def prepare(self, settings: IdentitySettings) -> Identities:
        """What `use` takes: keys of all kinds are read. Issuers that stay keep the keys that they have.

        Raises:
            SettingsError: a file of keys cannot be used.
            TransportUnavailable, nats.errors.Error: JetStream does not answer.
        """
        before, forget = self._identities, self._known.clear
        issuers, bucket = dict[str, IssuerKeys](), None
        for number, one in enumerate(settings.jwt):
            known = before.issuers.get(one.issuer)
            if known is None or known.settings != one:
                known = IssuerKeys(one, f"identity.jwt.{number}", forget)
            issuers[one.issuer] = known
            await known.start()
        if settings.api_keys:
            bucket = before.bucket or KeyBucket(self._replicas, forget)
            if self._client is not None:
                await bucket.start(self._client)
        return Identities(settings, issuers, bucket)

    def use(self, identities: Identities) -> None:
        """Later calls are authenticated by ``identities``."""
        self._identities = identities
        self.takes_certificates = bool(identities.settings.certificates)
        self._known.clear()
        self._replaced.set()

    async def run(self) -> None:
        """Keeps the keys up to date, until it is cancelled."""
        while True:
            self._replaced.clear()
            async with asyncio.TaskGroup() as group:
                running = group.create_task(self._identities.run())
                await self._replaced.wait()
                running.cancel()

    async def refresh_keys(self) -> None:
        """Read the API keys of the mesh again if they have changed; raises TransportUnavailable."""
        if self._identities.bucket is not None:
            await self._identities.bucket.refresh()

    async def caller_of(
        self, metadata: Mapping[str, str], certificate_names: Collection[str] = ()
    ) -> Caller:
        """Who calls.

        Args:
            metadata: of a gRPC call, or headers of an HTTP request with names in lower case.
            certificate_names: subject alternative names of a client certificate that the connection has verified.

        Raises:
            Unauthenticated: nobody, or nobody any more.
            PermissionDenied: the metadata names another tenant.
            InvalidRequest: the metadata names no possible tenant.
            TransportUnavailable: the keys of the token's issuer could not be fetched yet.
        """
        if not self.on:
            return _anybody(tenant_of(metadata))
        given = metadata.get(AUTHORIZATION, "")
        if not given:
            return _as_named(self._of_certificate(certificate_names), metadata)
        digest = hashlib.sha256(given.encode()).digest()
        known = self._known.get(digest)
        if known is None or known[1] <= self._time():
            if given[: len(_BEARER)].lower() != _BEARER:
                raise Unauthenticated.of(
                    "CREDENTIALS_MISSING",
                    "authorization: must be 'Bearer ' and an API key or a token",
                )
            text = given[len(_BEARER) :].strip()
            mesh_key = self.mesh_key
            if mesh_key is not None and hmac.compare_digest(text.encode(), mesh_key.encode()):
                return _for_tenant(metadata)
            known = await self._verified(text)
            self._remember(digest, known)
        return _as_named(known[0], metadata)

    def of_item(self, caller: Caller) -> Caller:
        """Return ``caller``, a process of the mesh, with the limits that its key has now.

        Raises:
            Unauthenticated: The key was revoked, has expired, or is gone.
        """
        if not self.on or not caller.key_id:
            return caller
        bucket = self._identities.bucket
        records = {} if bucket is None else bucket.records
        of_key = caller_of_id(caller.key_id, caller.tenant, records, self._time())
        return replace(caller, key_limits=of_key.key_limits)

    async def _verified(self, text: str) -> tuple[Caller, float]:
        """Whose credential it is, and until when it may be remembered."""
        if text.startswith(PREFIX):
            bucket = self._identities.bucket
            return caller_of_key(text, {} if bucket is None else bucket.records, self._time())
        issuer = self._identities.issuers.get(issuer_of(text))
        if issuer is None:
            raise Unauthenticated.of(
                "TOKEN_INVALID", "the token is of an issuer that is not trusted here"
            )
        try:
            return caller_of_token(text, issuer.settings, issuer.keys, self._time())
        except KeyMissing:
            await issuer.refresh()
        return caller_of_token(text, issuer.settings, issuer.keys, self._time())

    def _remember(self, digest: bytes, known: tuple[Caller, float]) -> None:
        while len(self._known) >= KNOWN_MAX:
            del self._known[next(iter(self._known))]
        self._known[digest] = known

    def _of_certificate(self, names: Collection[str]) -> Caller:
        for name in names:
            found = self._identities.settings.certificates.get(name)
            if found is not None:
                return Caller(found.tenant, frozenset(found.roles))
        if names and self.takes_certificates:
            raise Unauthenticated.of(
                "CERTIFICATE_UNKNOWN",
                f"no name of the client certificate is in identity.certificates: {', '.join(names)}",
            )
        raise Unauthenticated.of(
            "CREDENTIALS_MISSING",
            "this mesh asks who calls: send an API key (SLUICE_API_KEY, api_key= of the client, or the header "
            "'authorization: Bearer ...')",
        )


@lru_cache(KNOWN_MAX)
def _anybody(tenant: str) -> Caller:
    """Who calls for ``tenant`` where nobody is asked, or in the name of the mesh."""
    return Caller(tenant)


def _for_tenant(metadata: Mapping[str, str]) -> Caller:
    """Return a process of the mesh that calls for a tenant, and the key of a job, which `of_item` checks."""
    caller, key_id = _anybody(tenant_of(metadata)), metadata.get(KEY_METADATA, "")
    return replace(caller, key_id=key_id) if key_id else caller


def _as_named(caller: Caller, metadata: Mapping[str, str]) -> Caller:
    """``caller``, if the metadata names no other tenant."""
    named = metadata.get(TENANT_METADATA)
    if named is not None and named != caller.tenant:
        raise PermissionDenied(
            f"{TENANT_METADATA}: the credentials are of tenant {caller.tenant!r}: name no tenant, or that one"
        )
    return caller
