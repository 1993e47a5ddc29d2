"""Reloads models, policies, limits and identities of all gateways while they run.

Running requests keep what they began with. A reload of one gateway is a reload of all:

1. The gateway writes the new sections into JetStream as a *candidate*.
2. Every gateway that sees the candidate loads and compiles it. Its heartbeat says that it is ready,
   or why not.
3. When all are ready, the candidate is written over the record in force, and every gateway starts
   to use what it has loaded. Otherwise nothing changes.

A gateway that missed the candidate loads the record in force when it sees it. While it cannot, it
is not serving, logs why, and tries again.

A gateway that starts uses the record in force if its own file is one that this record replaced. A
file that no reload has seen is newer, and stays. A new or changed model cannot be used before a
batcher has a worker of it: for this a reload waits `ReloadTimes.ready_s`, then it fails.
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

from gateway.admission.policies import InForce, Policies
from gateway.identity.authenticator import Authenticator, Identities
from gateway.records.store import RecordStore
from gateway.shared.peers import HEARTBEAT_S
from gateway.shared.state import SharedState
from gateway.streaming.load_table import ModelLoadTable
from gateway.telemetry.drift import DriftMonitor
from sluice.background import wait_for_event
from sluice.errors import SetupError, SluiceError
from sluice.internal.v1.gateway_pb2 import GatewayHeartbeat, PolicyRecord
from sluice.settings import Settings, SettingsError, parse
from sluice.settings.reload import TAKEN_WHILE_RUNNING, refuse_changes

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.05
"""Interval at which a new model is looked up in the load table, in seconds."""
_DIFFER: Final = (
    "word lists, learned routers, models or key files differ; give every gateway the same files"
)
_REPLACED_MAX: Final = 64
"""Digests of older files that a record keeps."""
_PROBLEM_MAX: Final = 4096
"""Longest problem in a heartbeat, in characters."""
_IN_FORCE: Final = "gateway"
_CANDIDATE: Final = "candidate"
_OF_OTHERS: Final = frozenset({"batcher", "triton", "retiring"})
"""Sections that a gateway does not use."""
_OF_IDENTITY: Final = frozenset({"identity.api_keys", "identity.jwt", "identity.certificates"})
"""Settings of identity that can be reloaded; the key of the mesh belongs to other processes too."""
_RELOADABLE_SETTINGS: Final = TAKEN_WHILE_RUNNING["gateway"] - {"identity"} | _OF_IDENTITY

Load = Callable[[Settings, Policies], Policies]
"""Loads the policies of settings, which replace others; thread-safe.

Raises:
    SettingsError: one line that names what is wrong.
"""


@dataclass(frozen=True)
class ReloadTimes:
    """Bounds of the waits of a reload, in seconds.

    Attributes:
        prepare_s: how long the other gateways may take to load and compile a candidate.
        use_s: how long they may take to put it in force.
        ready_s: how long the first worker of a new model may take to be reported.
        retry_s: delay before a record that could not be used is tried again.
    """

    prepare_s: float = 20.0
    use_s: float = 2.0
    ready_s: float = 10.0
    retry_s: float = 10.0


@dataclass(frozen=True)
class _Loaded:
    """Policies and identities that are ready to use.

    Attributes:
        compiled: hash of everything that decides, with word lists, learned routers and key files.
    """

    policies: Policies
    identities: Identities
    compiled: str


@dataclass
class GatewayReload:
    """Reloads this gateway, and takes part in the reloads of others.

    Called with settings it is `sluice.settings.reload.Apply`.

    Attributes:
        loads: tells whether a model has a worker.
        store: record store, which follows the policies in force.
        drift: drift monitor, likewise.
        authenticator: likewise.
        revision: revision of the record that this gateway uses, or that a newer file of its own
            overrides since the start; 0: none.
        lock: held while a reload runs here.
    """

    load: Load
    shared: SharedState
    in_force: InForce
    loads: ModelLoadTable
    store: RecordStore
    drift: DriftMonitor
    authenticator: Authenticator
    times: ReloadTimes = ReloadTimes()

    def __post_init__(self) -> None:
        self.revision = self._seen = 0
        """Revisions of the record in force: the one that this gateway uses, and the latest that it has
        read.
        """
        self._compiled = ""
        """`_Loaded.compiled` of what is in use."""
        self._candidate = GatewayHeartbeat()
        """What its heartbeat says about the newest candidate that this gateway has seen."""
        self._prepared: _Loaded | None = None
        """The newest candidate, loaded, if nothing else was put in force since."""
        self.lock = asyncio.Lock()
        self._heartbeat_came = asyncio.Event()
        self._newer = asyncio.Event()

    async def __call__(self, settings: Settings) -> None:
        """Put `settings` in force at all gateways, or at none.

        Raises:
            SettingsError: they are invalid, change something else, or another gateway cannot use
                them; the old ones stay in force.
        """
        _check(self._settings, settings)
        async with self.lock:
            loaded = await self._load(settings)
            # Equal policies need no agreement, unless this gateway is behind the others.
            revision = self.revision
            if loaded.compiled != self._compiled or self._is_behind:
                try:
                    revision = await self._propose(loaded)
                except SluiceError as error:
                    raise SettingsError(f"{error}; no gateway has changed") from error
            self._use(loaded, revision)
            await self.shared.peers.send_heartbeat()
            await self._until(lambda heartbeat: heartbeat.policies >= revision, self.times.use_s)

    @property
    def _settings(self) -> Settings:
        return self.in_force.policies.settings

    @property
    def _is_behind(self) -> bool:
        """Whether the others use a record that this gateway does not use yet."""
        revisions = (heartbeat.policies for heartbeat in self.shared.peers.heartbeats.values())
        return max((self._seen, *revisions)) > self.revision

    async def _load(self, settings: Settings) -> _Loaded:
        """Load and compile in a thread, and read keys; return once every new model has a worker."""
        try:
            identities = await self.authenticator.prepare(settings.identity)
        except (SluiceError, NatsError) as error:
            raise SettingsError(f"identity: {error}") from error
        before = self.in_force.policies
        policies = await asyncio.to_thread(self.load, settings, before)
        served = set(before.catalog.tasks.values())
        for name, task in policies.catalog.tasks.items():
            if task not in served:
                await self._until_served(name, task)
        digest = _digest([sections_of(settings), policies.versions, identities.digests])
        return _Loaded(policies, identities, digest)

    async def _until_served(self, name: str, task: str) -> None:
        try:
            async with asyncio.timeout(self.times.ready_s):
                while not self.loads.load(task, time.monotonic()).ready:  # noqa: ASYNC110, reports come every second
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise SettingsError(
                f"models: {name}: no batcher has a worker of {task}; start one and reload the batchers first"
            ) from None

    async def _propose(self, loaded: _Loaded) -> int:
        """Let all gateways load `loaded`, then write it over the record in force; return the revision.

        Raises:
            SettingsError: one cannot, or does not reply, or another reload was first.
            SluiceError: JetStream does not respond.
        """
        settings, bucket = loaded.policies.settings, self.shared.policies
        record = PolicyRecord(
            sections=sections_of(settings), digest=_digest_of(settings), compiled=loaded.compiled
        )
        replaced, last = await bucket.read(_IN_FORCE, PolicyRecord) or (PolicyRecord(), 0)
        revision = await bucket.write(_CANDIDATE, record)
        assert revision is not None, "it replaces whatever is there"
        try:
            self._candidate = GatewayHeartbeat(candidate=revision)
            await self.shared.peers.send_heartbeat()
            # Every gateway must be able to use it before any gateway does.
            await self._until_ready(revision)
            await self.store.ensure_outcomes(settings.routing.outcomes)
            record.replaced.extend(self._replaced(replaced, record.digest))
            # Fails if another gateway has put something in force since it was read.
            in_force = await bucket.write(_IN_FORCE, record, last)
        except (TimeoutError, NatsError) as error:
            raise SettingsError(
                f"routing.outcomes: JetStream refused the change: {error}"
            ) from error
        finally:
            with suppress(SluiceError):
                await bucket.remove(revision)
        # The candidate was never in force, so there is nothing to undo.
        if in_force is None:
            raise SettingsError("another gateway reloaded at the same time; try again")
        return in_force

    async def _until_ready(self, revision: int) -> None:
        await self._until(lambda heartbeat: heartbeat.candidate >= revision, self.times.prepare_s)
        for name, heartbeat in self.shared.peers.heartbeats.items():
            # A later candidate has replaced this one in the bucket.
            if heartbeat.candidate > revision:
                raise SettingsError("another gateway is reloading; try again")
            problem = "no reply" if heartbeat.candidate < revision else heartbeat.candidate_problem
            if problem:
                raise SettingsError(f"gateway {name}: {problem}; no gateway has changed")

    def _replaced(self, record: PolicyRecord, digest: str) -> list[str]:
        """Return the digests of all sections that those with `digest` replace, newest last."""
        heartbeats, own = self.shared.peers.heartbeats.values(), _digest_of(self._settings)
        elsewhere = (heartbeat.candidate_replaces for heartbeat in heartbeats)
        replaced = dict.fromkeys([*record.replaced, record.digest, own, *elsewhere])
        return [old for old in replaced if old not in ("", digest)][-_REPLACED_MAX:]

    async def _until(self, condition: Callable[[GatewayHeartbeat], bool], timeout_s: float) -> None:
        """Return once every other gateway's heartbeat fulfils `condition`, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not all(map(condition, self.shared.peers.heartbeats.values())):
                    self._heartbeat_came.clear()
                    await wait_for_event(
                        self._heartbeat_came, HEARTBEAT_S
                    )  # a silent gateway expires

    def _use(self, loaded: _Loaded, revision: int) -> None:
        """Replace all policies at once; `revision` is that of their record."""
        self.in_force.replace(loaded.policies, time.monotonic())
        self.drift.use(loaded.policies.router.held_out, loaded.policies.settings.routing.drift)
        self.authenticator.use(loaded.identities)
        self.revision = self._seen = revision
        self._compiled, self._prepared, self.in_force.problem = loaded.compiled, None, ""

    def add_to(self, heartbeat: GatewayHeartbeat) -> None:
        """Add what this gateway uses, and its view of the candidate."""
        heartbeat.policies = self.revision
        heartbeat.MergeFrom(self._candidate)

    def on_heartbeat(self, heartbeat: GatewayHeartbeat) -> None:
        """Wake `run` if another gateway uses or proposes something newer."""
        self._heartbeat_came.set()
        if heartbeat.policies > self._seen or heartbeat.candidate > self._candidate.candidate:
            self._newer.set()

    async def join(self) -> None:
        """Start with the record in force, if this gateway's own file is older.

        Raises:
            SetupError: JetStream does not respond.
            SettingsError: the record cannot be used.
        """
        try:
            stored = await self.shared.policies.read(_IN_FORCE, PolicyRecord)
        except SluiceError as error:
            raise SetupError(str(error)) from error
        if stored is None:
            return
        record, self.revision = stored
        self._seen, own = self.revision, _digest_of(self._settings)
        # The own file is older than the record; one that nobody knows is newer and stays.
        if own in record.replaced:
            self._use(await self._load(self._with(record.sections)), self.revision)
            logger.info("using the policies of the last reload, which replaced those of the file")
        elif own != record.digest:
            logger.warning(
                "using the policies of the file, which differ from those of the last reload"
            )

    async def run(self) -> None:
        """Load what other gateways propose and use what they put in force, until it is cancelled."""
        while True:
            await wait_for_event(self._newer, self.times.retry_s if self.in_force.problem else None)
            self._newer.clear()
            async with self.lock:
                try:
                    if self._is_behind:
                        await self._use_in_force()
                    await self._prepare()
                except SluiceError as error:  # the next heartbeat says it again
                    logger.warning("reading the policies of another gateway failed: %s", error)
                    if self._is_behind:
                        self.in_force.problem = str(error)
            await self.shared.peers.send_heartbeat()

    async def _use_in_force(self) -> None:
        """Put the record in force to use in this gateway."""
        stored = await self.shared.policies.read(_IN_FORCE, PolicyRecord)
        if stored is None:
            return
        record, self._seen = stored
        loaded, problem = self._prepared, ""
        # This gateway missed the candidate, or another one was put in force.
        if loaded is None or loaded.compiled != record.compiled:
            loaded, problem = await self._loaded(record)
        if loaded is not None:
            self._use(loaded, self._seen)
            logger.info("using the policies that another gateway reloaded")
            return
        self.in_force.problem = problem
        logger.error(
            "not serving: the policies that another gateway reloaded cannot be used: %s", problem
        )

    async def _prepare(self) -> None:
        """Load the candidate, unless that has been done."""
        stored = await self.shared.policies.read(_CANDIDATE, PolicyRecord)
        record, revision = stored or (PolicyRecord(), 0)
        # Withdrawn, or loaded before.
        if revision <= self._candidate.candidate:
            return
        replaces = _digest_of(self._settings)
        self._prepared, problem = await self._loaded(record)
        # The same sections, but other files: this gateway would decide otherwise than the others.
        if self._prepared is not None and self._prepared.compiled != record.compiled:
            self._prepared, problem = None, _DIFFER
        self._candidate = GatewayHeartbeat(
            candidate=revision, candidate_problem=problem, candidate_replaces=replaces
        )

    async def _loaded(self, record: PolicyRecord) -> tuple[_Loaded | None, str]:
        """Load the policies of `record`, or return why they cannot be used."""
        try:
            return await self._load(self._with(record.sections)), ""
        except (SettingsError, SluiceError) as error:
            return None, str(error)[:_PROBLEM_MAX]
        # Otherwise the task of `run` would end, and the gateway that proposes would wait.
        except Exception as error:
            logger.exception("loading policies failed")
            return None, f"internal error: {type(error).__name__}; see the log of the gateway"

    def _with(self, sections: str) -> Settings:
        """Return the settings of this gateway with the policies of `sections`; raises SettingsError."""
        own: dict[str, Any] = self._settings.model_dump(mode="json")
        try:
            changed: dict[str, Any] = yaml.safe_load(sections)
            identity = own["identity"] | changed["identity"]
        except (yaml.YAMLError, TypeError, KeyError) as error:
            what = type(error).__name__
            raise SettingsError(f"the stored policies cannot be read: {what}") from error
        return parse(own | changed | {"identity": identity}, "policies")


def _check(before: Settings, after: Settings) -> None:
    """Raise SettingsError if `after` changes what cannot change while running."""
    refuse_changes(before, after, Settings.model_fields, _RELOADABLE_SETTINGS | _OF_OTHERS)
    if before.identity.enabled != after.identity.enabled:
        raise SettingsError(
            "identity: cannot be switched on or off while running; restart to change it"
        )


def sections_of(settings: Settings) -> str:
    """Return the sections of `settings` that a reload changes, as YAML without secrets."""
    sections = settings.model_dump(mode="json", include=set(TAKEN_WHILE_RUNNING["gateway"]))
    del sections["identity"]["mesh_key"]  # a secret, and the same at all gateways
    return yaml.safe_dump(sections, sort_keys=True)


def _digest_of(settings: Settings) -> str:
    return _digest(sections_of(settings))


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()
