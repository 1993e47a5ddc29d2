"""Reloads models, policies, limits and identities while the gateway runs; requests in flight keep what they began with.

A reload of one gateway is a reload of all. It asks every other one to load and compile the new policies; when one
cannot, nothing changes. Then it writes them into JetStream, and all take what they have prepared. A gateway that missed
the question takes them when it hears of the revision. One that starts takes them when its own file is one that they
have replaced; a file that no reload has seen is newer, and stays.

A model that is added or replaced is taken when a batcher has a worker of it.
"""

import asyncio
import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from nats.errors import Error as NatsError

from gateway.admission.policies import Policies
from gateway.config.policies import load_all
from gateway.identity.authenticator import Identities
from gateway.server import Gateway
from sluice.errors import SetupError, SluiceError
from sluice.internal.v1 import gateway_pb2
from sluice.settings import Settings, SettingsError, parse
from sluice.settings.reload import TAKEN_WHILE_RUNNING, refuse_changes

log = logging.getLogger(__name__)

PREPARE_S: Final = 20.0
"""How long the other gateways may take to load and compile policies, seconds."""
TAKE_S: Final = 2.0
"""How long they may take to replace theirs, seconds."""
READY_S: Final = 10.0
"""How long the first worker of a new model may take to be reported, seconds."""
_LOOK_S: Final = 0.05
_REPLACED_MAX: Final = 64
_KEY: Final = "gateway"
_LIVE: Final = frozenset({"identity.api_keys", "identity.jwt", "identity.certificates"})
"""Of the section `identity`; the key of the mesh is that of other processes too."""
_OF_OTHERS: Final = frozenset({"batcher", "triton", "retiring"})
"""Sections that a gateway does not use."""
_FIXED: Final = [
    name
    for name in Settings.model_fields
    if name not in TAKEN_WHILE_RUNNING["gateway"] - {"identity"} | _OF_OTHERS
]


@dataclass(frozen=True)
class _Loaded:
    """Policies that can be taken, with the keys of those who call.

    Attributes:
        compiled_digest: of all that decides: lists, learned routers and files of keys included.
    """

    policies: Policies
    identities: Identities
    compiled_digest: str

    @property
    def digest(self) -> str:
        """Of the sections as they are written."""
        return _digest_of(self.policies.settings)


class GatewayReload:
    """`sluice.settings.reload.Apply` of a gateway, and its part in the reloads of others."""

    def __init__(self, path: Path, gateway: Gateway) -> None:
        """``path`` is where the policies of ``gateway`` came from."""
        self._path = path
        self._gateway = gateway
        self._revision = 0
        """Of the record that this gateway knows."""
        self._in_force = ""
        """`_Loaded.compiled_digest` of what was taken last."""
        self._prepared: _Loaded | None = None
        self._reloading = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None
        gateway.before_serving.append(self._join)
        gateway.shared.peers.answer("prepare", self._prepare)
        gateway.shared.peers.answer("take", self._take)
        gateway.shared.peers.fill.append(self._tell)
        gateway.shared.peers.heard.append(self._hear)

    @property
    def _settings(self) -> Settings:
        """Of the policies in force."""
        return self._gateway.in_force.policies.settings

    async def __call__(self, settings: Settings) -> None:
        """Takes ``settings`` at all gateways, or at none.

        Raises:
            SettingsError: they are not valid, something else has changed, or another gateway cannot take them; the old
                ones stay in use.
        """
        _check(self._settings, settings)
        async with self._reloading:
            loaded = await self._load(settings, self._path)
            await self._until_ready(loaded)
            if loaded.compiled_digest != self._in_force:
                in_force = await self._others(loaded)
                await self._gateway.ensure_kept(loaded.policies)
                self._revision = await self._share(loaded, in_force)
            self._use(loaded)
        await self._gateway.shared.peers.ask_all(
            gateway_pb2.GatewayQuestion(take=gateway_pb2.TakeQuestion()), TAKE_S
        )

    async def _load(self, settings: Settings, path: Path | None) -> _Loaded:
        """Loads and compiles in a thread, and reads keys."""
        try:
            identities = await self._gateway.authenticator.prepare(settings.identity)
        except (SluiceError, NatsError) as error:
            raise SettingsError(f"identity: {error}") from error
        before = self._gateway.in_force.policies
        loaded = await asyncio.to_thread(load_all, settings, path, before)
        digest = _digest([_sections_of(settings), loaded.versions, identities.digests])
        return _Loaded(loaded, identities, digest)

    async def _until_ready(self, loaded: _Loaded) -> None:
        """Returns when every model that is new has a worker; raises SettingsError when one has none in time."""
        known = set(self._gateway.in_force.policies.catalog.tasks.values())
        new = {task: name for name, task in loaded.policies.catalog.tasks.items()}
        missing = ""
        try:
            async with asyncio.timeout(READY_S):
                for missing in new.keys() - known:
                    while not self._gateway.ready(missing):  # noqa: ASYNC110, reports come every second
                        await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise SettingsError(
                f"models: {new[missing]}: no batcher has a worker of {missing}; start its workers, and reload "
                "the batchers first"
            ) from None

    async def _others(self, loaded: _Loaded) -> list[str]:
        """Asks the other gateways to prepare ``loaded``; returns the digests of what is in force there.

        Raises:
            SettingsError: one cannot, or does not answer.
        """
        question = gateway_pb2.PrepareQuestion(
            sections=_sections_of(loaded.policies.settings), compiled=loaded.compiled_digest
        )
        answers = await self._gateway.shared.peers.ask_all(
            gateway_pb2.GatewayQuestion(prepare=question), PREPARE_S
        )
        in_force = []
        for name, answer in answers.items():
            problem = "does not answer" if answer is None else answer.problem
            if answer is None or problem:
                raise SettingsError(f"gateway {name}: {problem}; no gateway has changed")
            in_force.append(answer.policies)
        return in_force

    async def _share(self, loaded: _Loaded, in_force: list[str]) -> int:
        """Writes ``loaded`` for all gateways; returns the revision.

        Raises:
            SettingsError: JetStream does not answer, or another reload was first.
        """
        bucket = self._gateway.shared.policies
        try:
            known, last = await bucket.read(_KEY, gateway_pb2.PolicyRecord) or (
                gateway_pb2.PolicyRecord(),
                0,
            )
            replaced = dict.fromkeys(
                [*known.replaced, known.digest, _digest_of(self._settings), *in_force]
            )
            replaced.pop(loaded.digest, None)
            record = gateway_pb2.PolicyRecord(
                sections=_sections_of(loaded.policies.settings),
                digest=loaded.digest,
                replaced=list(filter(None, replaced))[-_REPLACED_MAX:],
            )
            revision = None
            if last <= self._revision:
                revision = await bucket.write(_KEY, record, last)
        except SluiceError as error:
            raise SettingsError(f"{error}; no gateway has changed") from error
        if revision is None:
            raise SettingsError("another gateway has reloaded at the same time; try again")
        return revision

    def _use(self, loaded: _Loaded) -> None:
        """Replaces all policies at once."""
        tried = self._gateway.in_force.policies.inspector.dry_run
        self._gateway.use(loaded.policies)
        self._gateway.authenticator.use(loaded.identities)
        self._in_force = loaded.compiled_digest
        if tried is not None and tried is not loaded.policies.inspector.dry_run:
            log.info("%s", tried)

    async def _prepare(self, question: gateway_pb2.GatewayQuestion) -> gateway_pb2.GatewayAnswer:
        """Another gateway reloads."""
        try:
            loaded = await self._load(self._with(question.prepare.sections), None)
            await self._until_ready(loaded)
        except SettingsError as error:
            return gateway_pb2.GatewayAnswer(problem=str(error))
        if loaded.compiled_digest != question.prepare.compiled:
            return gateway_pb2.GatewayAnswer(
                problem="its word lists, learned routers, models or files of keys differ; give every gateway the same "
                "files"
            )
        self._prepared = loaded
        return gateway_pb2.GatewayAnswer(policies=_digest_of(self._settings))

    async def _take(self, _: gateway_pb2.GatewayQuestion) -> gateway_pb2.GatewayAnswer:
        await self._follow()
        return gateway_pb2.GatewayAnswer(policies=_digest_of(self._settings))

    async def _join(self) -> None:
        """This gateway starts: takes what the others have taken, when its own file is older."""
        try:
            found = await self._gateway.shared.policies.read(_KEY, gateway_pb2.PolicyRecord)
        except SluiceError as error:
            raise SetupError(str(error)) from error
        if found is None:
            return
        record, self._revision = found
        own = _digest_of(self._settings)
        if own in record.replaced:
            self._use(await self._load(self._with(record.sections), None))
            log.info("the policies of the last reload are in force, instead of those of the file")
        elif own != record.digest:
            log.warning(
                "the policies of the file differ from those of the last reload; they are in force in this gateway"
            )

    def _tell(self, hello: gateway_pb2.GatewayHello) -> None:
        hello.policies = self._revision

    def _hear(self, hello: gateway_pb2.GatewayHello) -> None:
        busy = self._following is not None and not self._following.done()
        if hello.policies > self._revision and not busy:
            self._following = asyncio.ensure_future(self._follow())

    async def _follow(self) -> None:
        """Takes what another gateway has written."""
        async with self._reloading:
            try:
                found = await self._gateway.shared.policies.read(_KEY, gateway_pb2.PolicyRecord)
                if found is None or found[1] <= self._revision:
                    return
                record, revision = found
                loaded, self._prepared = self._prepared, None
                if loaded is None or loaded.digest != record.digest:
                    self._revision = revision  # what cannot be loaded is tried once
                    loaded = await self._load(self._with(record.sections), None)
                self._use(loaded)
                self._revision = revision
                log.info("the policies of another gateway's reload are in force")
            except (SettingsError, SluiceError) as error:
                log.error("the policies of another gateway's reload are not in force: %s", error)

    def _with(self, sections: str) -> Settings:
        """The settings of this gateway with the policies of ``sections``; raises SettingsError."""
        own: dict[str, Any] = self._settings.model_dump(mode="json")
        try:
            given: dict[str, Any] = yaml.safe_load(sections)
            identity = own["identity"] | given["identity"]
        except (yaml.YAMLError, TypeError, KeyError) as error:
            raise SettingsError(
                f"the policies are not those of this release: {type(error).__name__}"
            ) from error
        return parse(own | given | {"identity": identity}, "policies")


def _check(before: Settings, after: Settings) -> None:
    """Raises SettingsError when ``after`` changes what cannot be changed while running."""
    refuse_changes(before, after, _FIXED, _LIVE)
    if before.identity.enabled != after.identity.enabled:
        raise SettingsError(
            "identity: cannot be switched on or off while running; start again to change it"
        )


def _sections_of(settings: Settings) -> str:
    sections = settings.model_dump(mode="json", include=set(TAKEN_WHILE_RUNNING["gateway"]))
    del sections["identity"]["mesh_key"]  # a secret, and the same at all of them
    return yaml.safe_dump(sections, sort_keys=True)


def _digest_of(settings: Settings) -> str:
    return _digest(_sections_of(settings))


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()
