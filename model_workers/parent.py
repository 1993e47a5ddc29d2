"""Ends this process when Triton has gone.

A stub whose server was killed can live on for minutes, with the model's memory and a full engine. The parent-death
signal of Linux does not help: it fires when the *thread* that started the stub ends, in Triton one that loads models.
"""

import os
import select
from threading import Thread


def exit_with_parent() -> None:
    """Starts a thread that sleeps until the parent process ends, and then ends this one without ado."""
    parent = os.pidfd_open(os.getppid())
    Thread(target=_wait, args=(parent,), name="parent", daemon=True).start()


def _wait(parent: int) -> None:
    select.select([parent], [], [])
    os._exit(1)
