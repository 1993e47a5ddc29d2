"""Changes the configuration of a running mesh: policies, limits, and the models that it serves.

A model that is added, or replaced by another version, is loaded first, beside what runs. Then batchers open its
channels, and when a worker of it is live all gateways give it the requests that come from then on. Those that run keep
the version that they began with; when the last has ended (`gateway.admission.policies`), its workers end. Whatever
fails on the way leaves everything as it was.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from model_workers.deploy import render_workers
from sluice.errors import SetupError
from sluice.settings import ModelSettings, Settings, SettingsError, parse, resolve_model_path
from sluice.settings.reload import TAKEN_WHILE_RUNNING
from sluice.startup import reachable
from sluice.wire.connection import MeshClient, NatsUnreachable, connect, disconnect
from sluice.wire.permissions import OPERATOR
from sluice.wire.reload import request_reload
from supervisor.control_socket import listen
from supervisor.health import denies, wait_until_reachable
from supervisor.model_processes import kill_when_stopped, triton_watcher
from supervisor.plan import (
    BATCHER,
    MeshPlan,
    RemoteConfig,
    check_models,
    kind_of,
    plan_version,
    version_folder,
)
from supervisor.specs import remote_spec, triton_spec
from supervisor.state import DEFAULTS, Origin, ProcessState, write_atomically
from supervisor.supervisor import SupervisedProcess, Supervisor
from supervisor.triton import TritonConfig
from supervisor.versions import Version, change_of

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

RELOAD_S: Final = 45.0
"""How long a process may take to accept or reject the configuration, seconds."""
LOOK_S: Final = 1.0
"""How often gateways are asked whether a version is still in use, seconds."""


@dataclass(frozen=True)
class Reloaded:
    """What a reload did.

    Attributes:
        processes: names of those that took the configuration.
        changed: whether it differs from the one before; lists of words are read again in any case.
        seconds: how long it took.
        models: what happened to each model that is another now: "added", "replaced", "removed", "changed".
    """

    processes: tuple[str, ...]
    changed: bool
    seconds: float
    models: dict[str, str]


class Reload:
    """The configuration of a running mesh, and the versions of its models.

    Attributes:
        settings: in force, with every address filled in.
        origin: where they came from.
    """

    def __init__(
        self,
        plan: MeshPlan,
        supervisor: Supervisor,
        origin: Origin = DEFAULTS,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when `origin` has changed."""
        self.settings, self.origin = plan.settings, origin
        self._on_change = on_change
        self._plan = plan
        self._supervisor = supervisor
        self._served = _first_versions(plan)
        self._retiring: tuple[Version, ...] = ()
        self._generations = {one.model.name: one.settings.generation for one in self._served}
        self._busy = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ending: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Accept commands from now on."""
        self._server = await listen(self._plan.state.root, self._answer)

    async def stop(self) -> None:
        """Accept no more commands, and cancel a reload that runs; what it has done is undone."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, command: dict[str, Any]) -> dict[str, Any]:
        text = command["settings"]
        settings = None if text is None else parse(text, "configuration")
        # A task, so that the end of the mesh ends it too.
        done = asdict(await self._spawn(self.reload(settings)))
        if settings is not None:
            self.origin = replace(self.origin, config=command["config"])
            self._on_change()
        return done

    async def reload(self, settings: Settings | None) -> Reloaded:
        """Put `settings` into force, all of it or nothing; None: what is in force, with files read again.

        Raises:
            SettingsError: it cannot work, or a process cannot take it.
            SetupError: another reload runs, a model could not be loaded, or a process does not answer.
        """
        if self._busy.locked():
            raise SetupError("another reload is running; try again when it is done")
        begun = time.monotonic()
        async with self._busy:
            if settings is None:
                models = tuple(one.model for one in self._served)
                settings = self.settings.model_copy(update={"models": models})
            await asyncio.to_thread(check_models, settings)
            pairs = await asyncio.to_thread(
                lambda: [(model, _files_of(model)) for model in settings.models]
            )
            change = change_of(pairs, self._served, self._retiring, self._generations)
            before, names = self.settings, self._running()
            started = await self._start_all(change.new, settings)
            try:
                by_name = {one.settings.task_name: one for one in started}
                served = [by_name.get(model.settings.task_name, model) for model in change.models]
                await self._put_in_force(_settings_of(settings, served, change.retired), names)
            except BaseException:
                await self._end_all(started)
                raise
            self._served, self._retiring = tuple(served), change.retired
        if self._retiring and (self._ending is None or self._ending.done()):
            self._ending = self._spawn(self._end_retired())
        processes = tuple(process.name for process in names)
        changed = self.settings.to_yaml() != before.to_yaml()
        return Reloaded(processes, changed, time.monotonic() - begun, dict(change.words))

    def _spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Workers.

    async def _start_all(self, versions: Iterable[Version], settings: Settings) -> list[Version]:
        """Load `versions`, all or none."""
        started: list[Version] = []
        try:
            for version in versions:
                name = version.model.name
                self._generations[name] = version.settings.generation
                plan = plan_version(self._plan, settings, version.settings)
                await asyncio.to_thread(_write_files, plan, settings)
                processes = start_workers(self._supervisor, plan)
                names = tuple(process.spec.name for process in processes)
                (served,) = plan.settings.models
                started.append(replace(version, settings=served, processes=names))
                await self._until_loaded(plan, processes)
        except BaseException:
            await self._end_all(started)
            raise
        return started

    async def _until_loaded(self, plan: MeshPlan, processes: list[SupervisedProcess]) -> None:
        start_s, tls = self.settings.triton.start_s, self.settings.tls.mesh
        workers: list[TritonConfig | RemoteConfig] = [*plan.tritons, *plan.remotes]
        for one in workers:
            answering = wait_until_reachable(one.name, one.address, start_s, tls)
            await self._supervisor.during_start(answering, processes)

    async def _end_all(self, versions: Iterable[Version]) -> None:
        for version in versions:
            for name in version.processes:
                await self._supervisor.end(name)

    async def _end_retired(self) -> None:
        """End the workers of replaced versions, each when no request can need it any more."""
        while self._retiring:
            await asyncio.sleep(LOOK_S)
            try:
                await self._end_unused()
            except (SetupError, SettingsError) as error:
                logger.warning("kept workers of replaced models: %s", error)

    async def _end_unused(self) -> None:
        async with self._busy:
            unused = [one for one in self._retiring if await self._is_unused(one)]
            if not unused:
                return
            left = tuple(one for one in self._retiring if one not in unused)
            batchers = [process for process in self._running() if process.name == BATCHER]
            after = _settings_of(self.settings, self._served, left)
            await self._put_in_force(after, batchers)
            self._retiring = left
            await self._end_all(unused)
        for one in unused:
            logger.info("stopped the workers of %s: no gateway uses it", one.settings.task_name)

    async def _is_unused(self, version: Version) -> bool:
        """Return whether every gateway reports the model as unused."""
        service = f"tasks.{version.settings.task_name}"
        tls = self.settings.tls.mesh
        for gateway in self._plan.gateways:
            if not await denies(reachable(gateway.address), service, tls):
                return False
        return True

    # Processes that read the configuration.

    async def _put_in_force(self, after: Settings, processes: list[ProcessState]) -> None:
        """Write `after` for all and have `processes` read it; if one refuses, all read the former one again."""
        file, running = self._plan.state.config, self.settings
        before = file.read_text(encoding="utf-8")
        try:
            client = await connect(running.nats, OPERATOR, OPERATOR, lambda: None, running.tls.mesh)
        except NatsUnreachable as error:
            raise SetupError(f"no process can be asked to reload: {error}") from error
        try:
            write_atomically(file, after.to_yaml())
            for process in processes:
                await self._reload_process(client, process)
        except BaseException:
            write_atomically(file, before)
            for process in processes:
                with suppress(SetupError, SettingsError):
                    await self._reload_process(client, process)
            raise
        finally:
            await disconnect(client)
        self.settings = after

    async def _reload_process(self, client: MeshClient, process: ProcessState) -> None:
        """Wait until `process` has taken the configuration."""
        assert process.pid is not None
        answer = await request_reload(
            client, process.pid, self._plan.state.config, lambda: process.alive, RELOAD_S
        )
        if answer is None:
            raise SetupError(f"{process.name} did not answer; see its log {process.log}")
        if not answer.taken:
            raise SettingsError(f"{process.name}: {answer.problem}")

    def _running(self) -> list[ProcessState]:
        """Return the processes that reload, batchers first; of several gateways the first, which reloads the others.

        One that waits for its restart reads the new file when it starts.
        """
        by_kind: dict[str, ProcessState] = {}
        for process in self._supervisor.states:
            if process.alive:
                by_kind.setdefault(kind_of(process.name), process)
        reloading = [process for kind, process in by_kind.items() if kind in TAKEN_WHILE_RUNNING]
        if not reloading:
            raise SetupError(
                "no process that reloads its configuration runs now; see: sluice status"
            )
        return reloading


def start_workers(supervisor: Supervisor, plan: MeshPlan) -> list[SupervisedProcess]:
    """Start the workers of `plan` and return them; raise SetupError if one cannot be started: those before run on."""
    start_s, log = plan.settings.triton.start_s, plan.state.log
    started = [
        supervisor.start(triton_spec(triton, log(triton.name)), triton_watcher(triton, start_s))
        for triton in plan.tritons
    ]
    return started + [
        supervisor.start(remote_spec(plan, remote), kill_when_stopped) for remote in plan.remotes
    ]


def _first_versions(plan: MeshPlan) -> tuple[Version, ...]:
    """Return the model versions that the mesh starts with."""
    processes = {
        model.name: (
            *(triton.name for triton in plan.tritons if model.name in triton.models),
            *(remote.name for remote in plan.remotes if remote.model == model.name),
        )
        for model in plan.models
    }
    return tuple(
        Version(model, _files_of(model), served, processes[model.name])
        for model, served in zip(plan.models, plan.settings.models, strict=True)
    )


def _files_of(model: ModelSettings) -> str:
    """Return a digest of names, sizes and times of a model's files; of a hub id a digest of nothing."""
    digest = hashlib.sha256()
    for path in filter(None, (model.path, model.draft)):
        folder = Path(resolve_model_path(path))
        for file in sorted(folder.rglob("*")) if folder.is_dir() else ():
            if file.is_file():
                seen = file.stat()
                digest.update(f"{file} {seen.st_size} {seen.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _write_files(plan: MeshPlan, settings: Settings) -> None:
    """Write the Triton repository of a version, or a file for remote workers; devices are shared as at a start."""
    (model,) = plan.settings.models
    folder = version_folder(plan, model)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if plan.tritons:
        render_workers(settings.models, folder)
    if plan.remotes:
        alone = settings.model_dump(mode="json") | {"models": [model.model_dump(mode="json")]}
        alone |= {"routing": {"default": model.name}, "retiring": []}
        write_atomically(folder / "config.yaml", parse(alone, "configuration").to_yaml())


def _settings_of(
    settings: Settings, served: Iterable[Version], retiring: Iterable[Version]
) -> Settings:
    """Return `settings` with the versions that are served and those that retire, with their addresses."""
    update = {
        "models": tuple(one.settings for one in served),
        "retiring": tuple(one.settings for one in retiring),
    }
    return settings.model_copy(update=update)
