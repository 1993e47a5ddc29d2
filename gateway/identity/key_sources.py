"""Keep keys up to date: those of token issuers, from a file or an https URL, and the API keys of the mesh.

Keys of an issuer are read at the start, every 5 minutes, and when a token names a missing one. API keys are in
JetStream: all are read when the state of their bucket has changed, which is checked every second and after a change by
`sluice keys`. When reading fails, the last good keys stay in force.
"""

import asyncio
import hashlib
import json
import logging
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nats.aio.client import Client

from gateway.identity.credentials import KeySet, key_set
from sluice.errors import SettingsError, SluiceError, TransportUnavailable
from sluice.internal.v1.identity_pb2 import ApiKeyRecord
from sluice.settings.identity import JwtSettings
from sluice.wire import jetstream
from sluice.wire.bucket import Bucket

REFRESH_S: Final = 300.0
"""Interval between two reads of an issuer's keys, in seconds."""
AGAIN_S: Final = 5.0
"""Shortest interval between two reads of an issuer's keys, in seconds: tokens can name missing keys at will."""
FETCH_S: Final = 4.0
"""Timeout of a read from a URL, in seconds."""
BYTES_MAX: Final = 256 * 1024
"""Most bytes of an issuer's keys."""
POLL_S: Final = 1.0
"""Interval between two checks for changed API keys, in seconds: a gateway may miss the message of `sluice keys`."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class IssuerKeys:
    """The keys of one issuer, as last read.

    Attributes:
        settings: Settings of the issuer.
        setting: Key of these settings in the configuration, for messages.
        on_change: Called when the keys have changed.
        refresh_s: See `REFRESH_S`.
        again_s: See `AGAIN_S`.
        clock: Returns the time, in seconds.
    """

    settings: JwtSettings
    setting: str
    on_change: Callable[[], None]
    refresh_s: float = REFRESH_S
    again_s: float = AGAIN_S
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._payload: bytes | None = None
        self._keys: KeySet | None = None
        self._read_at = -math.inf
        self._reading = asyncio.Lock()

    async def start(self) -> None:
        """Read the keys. If a URL does not answer, `run` tries again.

        Raises:
            SettingsError: The file cannot be read, or is not a JWKS.
        """
        await self._read(must=not self.settings.is_url)

    @property
    def digest(self) -> str:
        """Digest of the keys as read."""
        return hashlib.sha256(self._payload or b"").hexdigest()

    @property
    def keys(self) -> KeySet:
        """The keys; raises TransportUnavailable if none were ever read."""
        if self._keys is None:
            raise TransportUnavailable(
                f"the keys of issuer {self.settings.issuer} could not be fetched yet",
                retry_after_s=self.again_s,
            )
        return self._keys

    async def refresh(self) -> None:
        """Read the keys again, unless that was tried less than `again_s` seconds ago; a failure is only logged."""
        async with self._reading:
            if self.clock() - self._read_at < self.again_s:
                return
            await self._read()

    async def run(self) -> None:
        """Read the keys periodically until cancelled."""
        while True:
            await asyncio.sleep(self.again_s if self._keys is None else self.refresh_s)
            await self.refresh()

    async def _read(self, *, must: bool = False) -> None:
        self._read_at = self.clock()
        try:
            payload = await asyncio.wait_for(
                asyncio.to_thread(_payload, self.settings), FETCH_S + 1
            )
            if payload != self._payload:
                self._keys, self._payload = key_set(_parsed(payload)), payload
                self.on_change()
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            problem = getattr(error, "strerror", None) or str(error) or type(error).__name__
            message = f"{self.setting}.jwks: {self.settings.jwks} cannot be used: {problem}"
            if must:
                raise SettingsError(message) from error
            effect = "its last keys stay in force"
            if self._keys is None:
                effect = "tokens of this issuer are refused until it answers"
            logger.warning("%s; %s", message, effect)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A handler that refuses redirects, which could lead away from https."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _payload(settings: JwtSettings) -> bytes:
    if not settings.is_url:
        data = Path(settings.jwks).read_bytes()
    else:
        opener = urllib.request.build_opener(_NoRedirect)
        try:
            with opener.open(settings.jwks, timeout=FETCH_S) as response:
                data = response.read(BYTES_MAX + 1)
        except urllib.error.HTTPError as error:
            error.close()
            raise ValueError(f"the server answers with status {error.code}") from error
    if len(data) > BYTES_MAX:
        raise ValueError(f"is larger than {BYTES_MAX} bytes")
    return data


def _parsed(payload: bytes) -> object:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None


class KeyBucket:
    """The API keys of the mesh.

    Attributes:
        records: Records of API keys by id, as last read.
    """

    def __init__(
        self, replicas: int, on_change: Callable[[], None], poll_s: float = POLL_S
    ) -> None:
        self.records: Mapping[str, ApiKeyRecord] = {}
        self._on_change = on_change
        self._bucket = Bucket(jetstream.API_KEYS, replicas)
        self._poll_s = poll_s
        self._state: object = None
        self._reading = asyncio.Lock()

    async def start(self, client: Client) -> None:
        """Create the bucket and read it; raise as `Bucket`."""
        await self._bucket.start(client)
        await self.refresh()

    async def refresh(self) -> None:
        """Read the keys if they have changed; raise TransportUnavailable if JetStream does not answer."""
        async with self._reading:  # an earlier read must not overwrite the result of a later one
            state = await self._bucket.state()
            if state == self._state:  # one small request instead of reading all keys
                return
            self.records = {
                key: record async for key, record in self._bucket.read_all(ApiKeyRecord)
            }
            self._state = state
            self._on_change()

    async def run(self) -> None:
        """Keep `records` up to date until cancelled."""
        is_reachable = True
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await self.refresh()
                is_reachable = True
            except SluiceError as error:
                if is_reachable:  # one line, however long it lasts
                    logger.warning(
                        "reading API keys failed, the last ones stay in force: %s", error
                    )
                is_reachable = False
