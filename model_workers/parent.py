"""Ends a worker's process when its server has ended, or on SIGTERM."""

import os
import select
import signal
from collections.abc import Callable
from threading import Thread


def exit_with_parent(on_term: Callable[[], None] = lambda: None) -> None:
    """Start a thread that ends this process: at once when its parent has ended, after `on_term` on SIGTERM.

    Call it on the main thread, which alone may set signal handlers.

    A stub whose server was killed can live on for minutes, with the model's memory and a full engine. The parent-death
    signal of Linux does not help: it is sent when the *thread* that started the stub ends, in Triton one that loads
    models.

    The main thread waits in C++ for messages of the server, so that a handler in Python would not run. Python writes
    each signal to a pipe, which the thread reads.
    """
    parent = os.pidfd_open(os.getppid())
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    Thread(target=_wait, args=(parent, reading, on_term), name="parent", daemon=True).start()


def _wait(parent: int, signals: int, on_term: Callable[[], None]) -> None:
    while True:
        readable, _, _ = select.select([parent, signals], [], [])
        if parent in readable:
            os._exit(1)
        if signal.SIGTERM in os.read(signals, 64):
            try:
                on_term()
            finally:
                os._exit(0)
