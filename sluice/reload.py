"""SIGHUP makes a running process read its configuration again; a file that cannot work leaves the old one in force."""

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sluice.settings import Settings, SettingsError, load

log = logging.getLogger(__name__)

Apply = Callable[[Settings], None]
"""Takes new settings into force, all or nothing.

Raises:
    SettingsError: they cannot work, or change what cannot be changed while running; the message names the key.
"""


@contextmanager
def reloading(path: Path, apply: Apply) -> Iterator[None]:
    """While inside, SIGHUP loads ``path`` and hands it to ``apply``, on the running loop. What came of it is logged."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, _reload, path, apply)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def _reload(path: Path, apply: Apply) -> None:
    try:
        apply(load(path))
    except SettingsError as error:
        log.error("the configuration stays as it was: %s", error)
    else:
        log.info("configuration read again: %s", path)
