"""Reloads models, policies, limits and identities while gateways run; requests in flight keep what they began with.

A reload of one gateway is a reload of all. It writes the new sections into JetStream as a candidate. Every gateway that
hears of it loads and compiles them, and says with its hello that it is ready, or why not. When all are ready the
candidate is written over what is in force, and each gateway that hears of that takes what it has loaded; else nothing
changes. A gateway that missed the candidate loads what is in force when it hears of it. While it cannot, it is not
serving, says why in its log, and tries again.

A gateway that starts takes what is in force when its own file is one that was replaced by it; a file that no reload
has seen is newer, and stays. A model that is added or replaced is taken when a batcher has a worker of it.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import yaml
from nats.errors import Error as NatsError

from gateway.admission.loads import ModelLoadTable
from gateway.admission.policies import InForce, Policies
from gateway.identity.authenticator import Authenticator, Identities
from gateway.records.store import RecordStore
from gateway.shared.peers import HELLO_S
from gateway.shared.state import SharedState
from gateway.telemetry.drift import DriftMonitor
from sluice.errors import SetupError, SluiceError
from sluice.internal.v1.gateway_pb2 import GatewayHello, PolicyRecord
from sluice.settings import Settings, SettingsError, parse
from sluice.settings.reload import TAKEN_WHILE_RUNNING, refuse_changes

log = logging.getLogger(__name__)

PREPARE_S: Final = 20.0
"""How long the other gateways may take to load and compile policies, seconds."""
TAKE_S: Final = 2.0
"""How long they may take to replace theirs, seconds."""
READY_S: Final = 10.0
"""How long the first worker of a new model may take to be reported, seconds."""
AGAIN_S: Final = 10.0
"""After this time what could not be taken is tried again, seconds."""
_LOOK_S: Final = 0.05
_DIFFER: Final = "its word lists, learned routers, models or files of keys differ; give every gateway the same files"
_REPLACED_MAX: Final = 64
_PROBLEM_MAX: Final = 4096
_IN_FORCE: Final = "gateway"
_CANDIDATE: Final = "candidate"
_OF_OTHERS: Final = frozenset({"batcher", "triton", "retiring"})
"""Sections that a gateway does not use."""
_OF_IDENTITY: Final = frozenset({"identity.api_keys", "identity.jwt", "identity.certificates"})
"""The key of the mesh is that of other processes too."""
_TAKEN: Final = TAKEN_WHILE_RUNNING["gateway"] - {"identity"} | _OF_IDENTITY

Load = Callable[[Settings, Policies], Policies]
"""Loads the policies of settings, which replace others; any thread may call it.

Raises:
    SettingsError: one line that names what cannot work.
"""


@dataclass(frozen=True)
class _Loaded:
    """Policies that can be taken, with the keys of those who call.

    Attributes:
        compiled: a hash of all that decides: lists, learned routers and files of keys included.
    """

    policies: Policies
    identities: Identities
    compiled: str


@dataclass
class GatewayReload:
    """`sluice.settings.reload.Apply` of a gateway, and its part in the reloads of others.

    Attributes:
        loads: tells whether a model has a worker.
        store, drift, authenticator: what follows the policies beside `in_force`.
    """

    load: Load
    shared: SharedState
    in_force: InForce
    loads: ModelLoadTable
    store: RecordStore
    drift: DriftMonitor
    authenticator: Authenticator

    def __post_init__(self) -> None:
        self._taken = self._seen = 0
        """Revisions of the record in force: that this gateway has taken last, and that it has read last."""
        self._compiled = ""
        """`_Loaded.compiled` of what was taken last."""
        self._candidate = GatewayHello()
        """What its hello says of the newest candidate that this gateway knows."""
        self._prepared: _Loaded | None = None
        """Of the newest candidate; nothing else was taken since."""
        self._reloading = asyncio.Lock()
        self._heard = asyncio.Event()
        self._newer = asyncio.Event()

    async def __call__(self, settings: Settings) -> None:
        """Takes ``settings`` at all gateways, or at none.

        Raises:
            SettingsError: they are not valid, something else has changed, or another gateway cannot take them; the old
                ones stay in use.
        """
        _check(self._settings, settings)
        async with self._reloading:
            loaded = await self._load(settings)
            revision = self._taken
            if loaded.compiled != self._compiled or self._is_behind:
                try:
                    revision = await self._propose(loaded)
                except SluiceError as error:
                    raise SettingsError(f"{error}; no gateway has changed") from error
            self._use(loaded, revision)
            await self.shared.peers.hello()
            await self._until(lambda hello: hello.policies >= revision, TAKE_S)

    @property
    def _settings(self) -> Settings:
        return self.in_force.policies.settings

    @property
    def _is_behind(self) -> bool:
        """Whether the others have taken what this gateway has not."""
        told = (hello.policies for hello in self.shared.peers.hellos.values())
        return max((self._seen, *told)) > self._taken

    async def _load(self, settings: Settings) -> _Loaded:
        """Loads and compiles in a thread, and reads keys; returns when every model that is new has a worker."""
        try:
            identities = await self.authenticator.prepare(settings.identity)
        except (SluiceError, NatsError) as error:
            raise SettingsError(f"identity: {error}") from error
        before = self.in_force.policies
        policies = await asyncio.to_thread(self.load, settings, before)
        known = set(before.catalog.tasks.values())
        for name, task in policies.catalog.tasks.items():
            if task not in known:
                await self._until_served(name, task)
        digest = _digest([_sections_of(settings), policies.versions, identities.digests])
        return _Loaded(policies, identities, digest)

    async def _until_served(self, name: str, task: str) -> None:
        try:
            async with asyncio.timeout(READY_S):
                while not self.loads.load(task, time.monotonic()).ready:  # noqa: ASYNC110, reports come every second
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise SettingsError(
                f"models: {name}: no batcher has a worker of {task}; start its workers, and reload the batchers first"
            ) from None

    async def _propose(self, loaded: _Loaded) -> int:
        """Has all gateways load ``loaded``, then writes it over what is in force; returns the revision.

        Raises:
            SettingsError: one cannot, or does not say, or another reload was first.
            SluiceError: JetStream does not answer.
        """
        settings, bucket = loaded.policies.settings, self.shared.policies
        record = PolicyRecord(
            sections=_sections_of(settings), digest=_digest_of(settings), compiled=loaded.compiled
        )
        known, last = await bucket.read(_IN_FORCE, PolicyRecord) or (PolicyRecord(), 0)
        revision = await bucket.write(_CANDIDATE, record)
        assert revision is not None, "it replaces whatever is there"
        try:
            self._candidate = GatewayHello(candidate=revision)
            await self.shared.peers.hello()
            await self._until_ready(revision)
            await self.store.ensure_outcomes(settings.routing.outcomes)
            record.replaced.extend(self._replaced(known, record.digest))
            taken = await bucket.write(_IN_FORCE, record, last)
        except (TimeoutError, NatsError) as error:
            raise SettingsError(f"routing.outcomes: JetStream does not take it: {error}") from error
        finally:
            with suppress(SluiceError):
                await bucket.remove(revision)
        if taken is None:
            raise SettingsError("another gateway has reloaded at the same time; try again")
        return taken

    async def _until_ready(self, revision: int) -> None:
        await self._until(lambda hello: hello.candidate >= revision, PREPARE_S)
        for name, hello in self.shared.peers.hellos.items():
            if hello.candidate > revision:
                raise SettingsError("another gateway reloads at the same time; try again")
            problem = "does not answer" if hello.candidate < revision else hello.candidate_problem
            if problem:
                raise SettingsError(f"gateway {name}: {problem}; no gateway has changed")

    def _replaced(self, known: PolicyRecord, digest: str) -> list[str]:
        """Digests of what is older than the sections of that ``digest``; ``known`` is what they replace."""
        hellos, own = self.shared.peers.hellos.values(), _digest_of(self._settings)
        theirs = (hello.candidate_replaces for hello in hellos)
        replaced = dict.fromkeys([*known.replaced, known.digest, own, *theirs])
        return [one for one in replaced if one not in ("", digest)][-_REPLACED_MAX:]

    async def _until(self, said: Callable[[GatewayHello], bool], bound_s: float) -> None:
        """Returns when every other gateway has said it with its last hello, or at the bound."""
        with suppress(TimeoutError):
            async with asyncio.timeout(bound_s):
                while not all(map(said, self.shared.peers.hellos.values())):
                    self._heard.clear()
                    await _wait(self._heard, HELLO_S)  # one that says nothing is forgotten

    def _use(self, loaded: _Loaded, revision: int) -> None:
        """Replaces all policies at once; ``revision`` is that of their record."""
        tried = self.in_force.policies.inspector.dry_run
        self.in_force.replace(loaded.policies, time.monotonic())
        self.drift.use(loaded.policies.router.held_out, loaded.policies.settings.routing.drift)
        self.authenticator.use(loaded.identities)
        self._taken = self._seen = revision
        self._compiled, self._prepared, self.in_force.problem = loaded.compiled, None, ""
        if tried is not None and tried is not loaded.policies.inspector.dry_run:
            log.info("%s", tried)

    # What other gateways do.

    def tell(self, hello: GatewayHello) -> None:
        """Adds to the next hello what this gateway has taken, and what it says of the candidate."""
        hello.policies = self._taken
        hello.MergeFrom(self._candidate)

    def hear(self, hello: GatewayHello) -> None:
        """Another gateway says it."""
        self._heard.set()
        if hello.policies > self._seen or hello.candidate > self._candidate.candidate:
            self._newer.set()

    async def join(self) -> None:
        """This gateway starts: takes what the others have taken, when its own file is older.

        Raises:
            SetupError: JetStream does not answer.
            SettingsError: it cannot take it.
        """
        try:
            found = await self.shared.policies.read(_IN_FORCE, PolicyRecord)
        except SluiceError as error:
            raise SetupError(str(error)) from error
        if found is None:
            return
        record, self._taken = found
        self._seen, own = self._taken, _digest_of(self._settings)
        if own in record.replaced:
            self._use(await self._load(self._with(record.sections)), self._taken)
            log.info("the policies of the last reload are in force, instead of those of the file")
        elif own != record.digest:
            log.warning(
                "the policies of the file differ from those of the last reload; they are in force in this gateway"
            )

    async def run(self) -> None:
        """Loads what other gateways propose, and takes what they put in force, until it is cancelled."""
        while True:
            await _wait(self._newer, AGAIN_S if self.in_force.problem else None)
            self._newer.clear()
            async with self._reloading:
                await self._follow()
            await self.shared.peers.hello()

    async def _follow(self) -> None:
        try:
            if self._is_behind:
                await self._take()
            await self._prepare()
        except SluiceError as error:  # the next hello says it again
            log.warning("the policies of another gateway were not read: %s", error)
            if self._is_behind:
                self.in_force.problem = str(error)

    async def _take(self) -> None:
        """Takes what is in force."""
        found = await self.shared.policies.read(_IN_FORCE, PolicyRecord)
        if found is None:
            return
        record, self._seen = found
        loaded, problem = self._prepared, ""
        if loaded is None or loaded.compiled != record.compiled:
            loaded, problem = await self._loaded(record)
        if loaded is not None:
            self._use(loaded, self._seen)
            log.info("the policies of another gateway's reload are in force")
        else:
            self.in_force.problem = problem
            log.error(
                "the policies of another gateway's reload are not in force: this gateway is not serving: %s",
                problem,
            )

    async def _prepare(self) -> None:
        """Loads the candidate, unless that has been done."""
        found = await self.shared.policies.read(_CANDIDATE, PolicyRecord)
        if found is None or found[1] <= self._candidate.candidate:
            return
        record, revision = found
        replaces = _digest_of(self._settings)
        self._prepared, problem = await self._loaded(record)
        if self._prepared is not None and self._prepared.compiled != record.compiled:
            self._prepared, problem = None, _DIFFER
        self._candidate = GatewayHello(
            candidate=revision, candidate_problem=problem, candidate_replaces=replaces
        )

    async def _loaded(self, record: PolicyRecord) -> tuple[_Loaded | None, str]:
        """The policies of ``record``, or why they cannot be taken."""
        try:
            return await self._load(self._with(record.sections)), ""
        except (SettingsError, SluiceError) as error:
            return None, str(error)[:_PROBLEM_MAX]
        except (
            Exception
        ) as error:  # the task of `run` would end, and the gateway that proposes would wait
            log.exception("policies cannot be loaded")
            return None, f"internal error: {type(error).__name__}; its log has the reason"

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


async def _wait(event: asyncio.Event, bound_s: float | None) -> None:
    """Returns when ``event`` is set, or at the bound."""
    with suppress(TimeoutError):
        async with asyncio.timeout(bound_s):
            await event.wait()


def _check(before: Settings, after: Settings) -> None:
    """Raises SettingsError when ``after`` changes what cannot be changed while running."""
    refuse_changes(before, after, Settings.model_fields, _TAKEN | _OF_OTHERS)
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
