"""Ends a worker's process when the process that started it ends."""

import os
import select
from threading import Thread


def exit_with_parent() -> None:
    """Starts a thread that waits until the parent process ends, and then ends this one at once.

    A stub whose server was killed can live on for minutes, with the model's memory and a full engine. The parent-death
    signal of Linux does not help: it is sent when the *thread* that started the stub ends, in Triton one that loads
    models.
    """
    parent = os.pidfd_open(os.getppid())
    Thread(target=_wait, args=(parent,), name="parent", daemon=True).start()


def _wait(parent: int) -> None:
    select.select([parent], [], [])
    os._exit(1)
