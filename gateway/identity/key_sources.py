"""Keys that are read again when they change: those of an issuer, from a file or an https URL, and those of the mesh.

Keys of an issuer are read at the start, every 5 minutes, and when a token names one that is missing. The API
keys of the mesh are in JetStream: once a second, and when `sluice keys` has changed them, the state of their bucket is
asked for, and when it has changed all are read. What cannot be read leaves the last good keys in force.
"""

import asyncio
import hashlib
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
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
AGAIN_S: Final = 5.0
"""Keys are not read more often than this, whoever asks: tokens can name keys at will."""
FETCH_S: Final = 4.0
BYTES_MAX: Final = 256 * 1024
POLL_S: Final = 1.0
"""How often a gateway asks for changes, in seconds: it may have missed the question of `sluice keys`."""

_log = logging.getLogger(__name__)


class IssuerKeys:
    """The keys of one issuer, as they were read last."""

    def __init__(self, settings: JwtSettings, setting: str, on_change: Callable[[], None]) -> None:
        """``setting`` is its key in the configuration, for messages."""
        self.settings = settings
        self._setting = f"{setting}.jwks"
        self._on_change = on_change
        self._payload = b""
        self._keys: KeySet | None = None
        self._read_at = -AGAIN_S
        self._reading = asyncio.Lock()

    async def start(self) -> None:
        """Reads the keys. A URL that does not answer is asked again later.

        Raises:
            SettingsError: the file cannot be read, or is no JWKS.
        """
        await self._read(must=not self.settings.is_url)

    @property
    def digest(self) -> str:
        """Of the keys as they were read."""
        return hashlib.sha256(self._payload).hexdigest()

    @property
    def keys(self) -> KeySet:
        """Raises TransportUnavailable when none were ever read."""
        if self._keys is None:
            raise TransportUnavailable(
                f"the keys of issuer {self.settings.issuer} could not be fetched yet",
                retry_after_s=AGAIN_S,
            )
        return self._keys

    async def refresh(self) -> None:
        """Reads the keys again, unless that was a moment ago."""
        async with self._reading:
            if time.monotonic() - self._read_at < AGAIN_S:
                return
            await self._read()

    async def run(self) -> None:
        """Reads the keys again and again, until it is cancelled."""
        while True:
            await asyncio.sleep(AGAIN_S if self._keys is None else REFRESH_S)
            await self.refresh()

    async def _read(self, *, must: bool = False) -> None:
        self._read_at = time.monotonic()
        try:
            payload = await asyncio.wait_for(
                asyncio.to_thread(_payload, self.settings), FETCH_S + 1
            )
            if payload != self._payload:
                self._keys, self._payload = key_set(_parsed(payload)), payload
                self._on_change()
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            problem = getattr(error, "strerror", None) or str(error) or type(error).__name__
            message = f"{self._setting}: {self.settings.jwks} cannot be used: {problem}"
            if must:
                raise SettingsError(message) from error
            known = "its last keys stay in force"
            none = "tokens of this issuer are refused until it answers"
            _log.warning("%s; %s", message, none if self._keys is None else known)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect could lead away from https."""

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
    """The API keys of the mesh, read again when they change.

    Attributes:
        records: by id, as last read.
    """

    def __init__(self, replicas: int, on_change: Callable[[], None]) -> None:
        self.records: Mapping[str, ApiKeyRecord] = {}
        self._on_change = on_change
        self._bucket = Bucket(jetstream.API_KEYS, replicas)
        self._state: object = None
        self._reading = asyncio.Lock()

    async def start(self, client: Client) -> None:
        """Creates the bucket and reads it; raises as `Bucket`."""
        await self._bucket.start(client)
        await self.refresh()

    async def refresh(self) -> None:
        """Reads the keys if they have changed; raises TransportUnavailable."""
        async with self._reading:  # an earlier reading must not replace what a later one found
            state = await self._bucket.state()
            if state == self._state:
                return
            self.records = {
                key: record async for key, record in self._bucket.read_all(ApiKeyRecord)
            }
            self._state = state
            self._on_change()

    async def run(self) -> None:
        """Keeps `records` up to date, until it is cancelled."""
        reached = True
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.refresh()
                reached = True
            except SluiceError as error:
                if reached:  # one line, however long it lasts
                    _log.warning("API keys stay as they were: %s", error)
                reached = False
