"""Reloads the configuration of a running process on SIGHUP; an invalid file leaves the old configuration active."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sluice.errors import SettingsError
from sluice.settings.mesh import Settings, load

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # `sluice reload` reads the outcome in the log, whatever its level

Apply = Callable[[Settings], Awaitable[None] | None]
"""Takes new settings into force, all or nothing; what takes long is awaited.

Raises:
    SettingsError: they cannot work, or change what cannot be changed while running; the message names the key.
"""

TAKEN_WHILE_RUNNING: Final[Mapping[str, frozenset[str]]] = {
    "gateway": frozenset({"models", "safety", "routing", "tenants", "limits", "identity"}),
    "batcher": frozenset({"models", "retiring", "batcher", "tenants"}),
}
"""Processes that reload on SIGHUP, each with the sections that it reloads. The signal would end any other process."""

_READ: Final = "configuration read again"
_KEPT: Final = "the configuration stays as it was"


@contextmanager
def reloading(path: Path, apply: Apply) -> Iterator[None]:
    """While inside, SIGHUP loads ``path`` and hands it to ``apply``, on the running loop. The outcome is logged."""
    loop = asyncio.get_running_loop()
    reloads = _Reloads(path, apply)
    loop.add_signal_handler(signal.SIGHUP, reloads.ask)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it must not end a process that drains
        reloads.close()


def refuse_changes(
    old: Settings, new: Settings, sections: Collection[str], live: Collection[str] = ()
) -> None:
    """Raises SettingsError for the first key in ``sections`` that ``new`` changes, but for those in ``live``."""
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    for section in sections:
        key = _difference(section, before[section], after[section], live)
        if key is not None:
            raise SettingsError(f"{key}: cannot be changed while running; start again to change it")


def outcome_in(text: str) -> tuple[bool, str] | None:
    """The outcome of the first reload in ``text``, part of a log: whether it was accepted, and why not."""
    for line in text.splitlines():
        _, ours, said = line.partition(f" {log.name} ")
        if ours and said.startswith(_READ):
            return True, ""
        if ours and said.startswith(_KEPT):
            return False, said.removeprefix(f"{_KEPT}: ")
    return None


class _Reloads:
    """One reload at a time; requests that come meanwhile make one more."""

    def __init__(self, path: Path, apply: Apply) -> None:
        self._path = path
        self._apply = apply
        self._asked = 0
        self._running: asyncio.Task[None] | None = None

    def ask(self) -> None:
        self._asked += 1
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._run())

    def close(self) -> None:
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        while self._asked:
            self._asked = 0
            await self._reload()

    async def _reload(self) -> None:
        try:
            applying = self._apply(load(self._path))
            if applying is not None:
                await applying
        except SettingsError as error:
            log.error("%s: %s", _KEPT, error)
        except Exception:  # the task would end silently, and `sluice reload` would wait
            log.exception("%s: internal error", _KEPT)
        else:
            log.info("%s: %s", _READ, self._path)


def _difference(key: str, before: Any, after: Any, live: Collection[str]) -> str | None:
    """The first key below ``key`` that differs and is not in ``live``."""
    if before == after or key in live:
        return None
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        before, after = dict(enumerate(before)), dict(enumerate(after))
    if not isinstance(before, dict) or not isinstance(after, dict):
        return key
    for name in dict.fromkeys((*before, *after)):
        found = _difference(f"{key}.{name}", before.get(name), after.get(name), live)
        if found is not None:
            return found
    return None
