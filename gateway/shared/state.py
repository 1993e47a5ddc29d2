"""All that the gateways of a mesh share over NATS, opened, written and closed together."""

import asyncio
import logging
from typing import Final

from google.protobuf.wrappers_pb2 import StringValue
from nats.aio.client import Client
from nats.js.api import StreamConfig

from gateway.admission.class_limiter import ClassLimiter
from gateway.admission.policies import InForce
from gateway.admission.usage import UsageAccounting
from gateway.identity.resume_token import ResumeKey
from gateway.shared.answers import AnswerCache
from gateway.shared.drains import Drains
from gateway.shared.keys import SharedKeys
from gateway.shared.peers import HELLO_S, Peers
from gateway.shared.usage import KeptCosts, SharedUsage
from gateway.streaming.registry import Registry
from sluice.errors import SluiceError
from sluice.settings import Settings
from sluice.wire import jetstream
from sluice.wire.bucket import Bucket, mesh_key, shared_secret

_log = logging.getLogger(__name__)

_CLOSE_S: Final = 2.0
"""How long answers may take to be stored at the end, seconds."""


class SharedState:
    """This gateway's part of what gateways share.

    Args:
        registry: its live requests.
        in_force: its policies.
        usage: what its tenants use.
        limiter: its calls.

    Attributes:
        peers: the other gateways.
        policies: what `GatewayReload` keeps.
        api_keys: of callers.
        idempotency_keys: the records of `keys`.
        resume_key: signs resume tokens.
    """

    def __init__(
        self,
        settings: Settings,
        gateway_id: str,
        registry: Registry,
        in_force: InForce,
        usage: UsageAccounting,
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
        self._kept_secrets: dict[str, str] = {}
        """By name, what this gateway knows of the bucket of secrets."""
        keep_s = limits.replay_s if limits.replay_entries else 0.0
        self.idempotency_keys = self._bucket(jetstream.KEYS)
        self.keys = SharedKeys(registry, self.idempotency_keys, peers, keep_s)
        kept = jetstream.answers_bucket(cache.max_mib * 1024 * 1024, cache.max_age_s)
        self.answers = AnswerCache(cache, self._bucket(kept, opened=cache.enabled), peers)
        self.drains = Drains(gateway_id, self._bucket(jetstream.DRAINS))
        minutes = KeptCosts(usage.spending, self._bucket(jetstream.SPENDING), peers.instance)
        days = KeptCosts(usage.days, self._bucket(jetstream.DAYS), peers.instance)
        self.usage = SharedUsage(in_force, usage.limits, limiter, minutes, days)

    async def open(self, client: Client) -> None:
        """Creates the buckets and reads what has been spent.

        Raises:
            nats.errors.Error, TransportUnavailable: JetStream does not answer.
        """
        self.drains.use(client)
        for bucket in self._buckets:
            await bucket.start(client)
        await self.usage.read()
        if self._settings.gateway.resume_key is None:
            self._kept_secrets["resume_key"] = await shared_secret(self._secrets, "resume_key")
            self.resume_key.use(self._kept_secrets["resume_key"])

    async def mesh_key(self) -> str | None:
        """What processes of the mesh show each other; None: nothing. As `open`, after it."""
        key = await mesh_key(self._settings, self._secrets)
        if key is not None and not self._settings.identity.mesh_key:
            self._kept_secrets["mesh_key"] = key
        return key

    async def restore(self) -> None:
        """Create the buckets that NATS has lost, with the secrets that this gateway uses; raises as `open`."""
        for bucket in self._buckets:
            await bucket.restore()
        for name, secret in self._kept_secrets.items():
            await self._secrets.write(name, StringValue(value=secret), last=0)
        await self._secrets.write("probe", StringValue())  # a full disk refuses nothing but writes

    def on_loss(self) -> None:
        """Messages of other gateways may have been lost."""
        self._reread.set()

    async def run(self) -> None:
        """Says hello and tells what is spent, until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.peers.run())
            group.create_task(self.drains.run())
            group.create_task(self._share_spending())

    async def close(self) -> None:
        """Stores the rest, and tells the others that this gateway leaves."""
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
            await asyncio.sleep(HELLO_S)
            if self._reread.is_set():
                self._reread.clear()
                try:
                    await self.usage.read()
                except SluiceError as error:
                    _log.warning("the spending of tenants was not read: %s", error)
            await self.usage.write()
