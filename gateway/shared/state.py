"""Everything that the gateways of a mesh share over NATS, opened, written and closed together."""

import asyncio
import logging
from typing import Final

from google.protobuf.wrappers_pb2 import StringValue
from nats.aio.client import Client
from nats.js.api import StreamConfig

from gateway.admission.class_limiter import ClassLimiter
from gateway.admission.policies import InForce
from gateway.admission.tenant_limits import TenantLimits
from gateway.identity.resume_token import ResumeKey
from gateway.shared.answers import SharedAnswerCache
from gateway.shared.drains import Drains
from gateway.shared.keys import SharedKeys
from gateway.shared.peers import HEARTBEAT_S, Peers
from gateway.shared.usage import SharedUsage, StoredCosts
from gateway.streaming.registry import Registry
from sluice.errors import SluiceError
from sluice.settings import Settings
from sluice.wire import jetstream
from sluice.wire.bucket import Bucket, mesh_key, shared_secret

logger = logging.getLogger(__name__)

_CLOSE_S: Final = 2.0
"""How long a gateway that shuts down waits for answers to be stored, in seconds."""


class SharedState:
    """This gateway's view of what the gateways share.

    Args:
        settings: of the mesh.
        gateway_id: of this gateway.
        registry: the live answers.
        in_force: the policies in use.
        tenants: accounting of tenants.
        limiter: the running calls.

    Attributes:
        peers: the other gateways.
        policies: bucket of `GatewayReload`.
        api_keys: bucket of the callers' API keys.
        idempotency_keys: bucket of `keys`.
        resume_key: signs resume tokens; without `gateway.resume_key` only valid after `open`.
    """

    def __init__(
        self,
        settings: Settings,
        gateway_id: str,
        registry: Registry,
        in_force: InForce,
        tenants: TenantLimits,
        limiter: ClassLimiter,
    ) -> None:
        self._settings = settings
        self._buckets: list[Bucket] = []
        self._reread = asyncio.Event()
        limits, cache = settings.gateway, settings.cache
        self.peers = peers = Peers(gateway_id)
        self.policies = self._bucket(jetstream.POLICIES)
        self.api_keys = self._bucket(jetstream.API_KEYS)
        self._secrets = self._bucket(jetstream.SECRETS)
        self.resume_key = ResumeKey(limits.resume_key or "")
        self._secret_values: dict[str, str] = {}
        """Secrets that this gateway has read or created, by name; `restore` writes them again."""
        keep_s = limits.replay_s if limits.replay_entries else 0.0
        self.idempotency_keys = self._bucket(jetstream.KEYS)
        self.keys = SharedKeys(registry, self.idempotency_keys, peers, keep_s)
        answers = jetstream.answers_bucket(cache.max_mib * 1024 * 1024, cache.max_age_s)
        self.answers = SharedAnswerCache(cache, self._bucket(answers, opened=cache.enabled), peers)
        self.drains = Drains(peers, self._bucket(jetstream.DRAINS))
        minutes = StoredCosts(tenants.spending, self._bucket(jetstream.SPENDING), peers.instance)
        days = StoredCosts(tenants.days, self._bucket(jetstream.DAYS), peers.instance)
        self.usage = SharedUsage(in_force, tenants, limiter, minutes, days)

    async def open(self, client: Client) -> None:
        """Create the buckets, read what tenants have spent, and read or create the key of resume tokens.

        Raises:
            nats.errors.Error: JetStream does not respond.
            TransportUnavailable: JetStream does not respond.
        """
        for bucket in self._buckets:
            await bucket.start(client)
        await self.usage.read()
        # Without a key of the operator's, all gateways share a random one.
        if self._settings.gateway.resume_key is None:
            self._secret_values["resume_key"] = await shared_secret(self._secrets, "resume_key")
            self.resume_key.use(self._secret_values["resume_key"])

    async def mesh_key(self) -> str | None:
        """Return the key that processes of the mesh show each other, None without identities; call it after `open`."""
        key = await mesh_key(self._settings, self._secrets)
        if key is not None and not self._settings.identity.mesh_key:
            self._secret_values["mesh_key"] = key
        return key

    async def restore(self) -> None:
        """Create the buckets that NATS has lost, with this gateway's secrets; raises as `open`."""
        for bucket in self._buckets:
            await bucket.restore()
        for name, secret in self._secret_values.items():
            await self._secrets.write(name, StringValue(value=secret), last=0)
        await self._secrets.write("probe", StringValue())  # a full disk refuses nothing but writes

    def on_loss(self) -> None:
        """Note that messages of other gateways may have been lost: spending is read again."""
        self._reread.set()

    async def run(self) -> None:
        """Send heartbeats, read drained workers, and share what tenants spend, until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.peers.run())
            group.create_task(self.drains.run())
            group.create_task(self._share_spending())

    async def close(self) -> None:
        """Store what is pending, and announce that this gateway leaves."""
        await self.keys.close()
        await self.answers.close(_CLOSE_S)
        await self.usage.write()
        await self.peers.close()

    def _bucket(self, config: StreamConfig, *, opened: bool = True) -> Bucket:
        bucket = Bucket(config, self._settings.nats.replicas)
        if opened:
            self._buckets.append(bucket)
        return bucket

    async def _share_spending(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._reread.is_set():
                self._reread.clear()
                try:
                    await self.usage.read()
                except SluiceError as error:
                    logger.warning("reading the spending of tenants failed: %s", error)
            await self.usage.write()
