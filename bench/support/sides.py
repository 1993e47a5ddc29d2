"""A side of a comparison in a process of its own, which sleeps while another side runs."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

START_S = 1800.0
"""Loading a large model and trying out its settings included."""
CALL_S = 1800.0


class SideFailed(RuntimeError):
    """A side's process raised or ended; the message is what it said."""


class Side:
    """Calls methods of an object that lives in a process of its own.

    Attributes:
        about: the object's attribute of that name: its settings, in words.
    """

    def __init__(self, make: Callable[..., Any], *args: Any, **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, make, args, options), daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            self.about: str = self._answer(START_S)
        except SideFailed:
            self.close()
            raise

    def __enter__(self) -> "Side":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def call(self, method: str, *args: Any) -> Any:
        """What ``method`` of the object returns.

        Raises:
            SideFailed: it raised, took longer than `CALL_S`, or the process has ended.
        """
        self._connection.send((method, args))
        return self._answer(CALL_S)

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _answer(self, bound_s: float) -> Any:
        if not self._connection.poll(bound_s):
            raise SideFailed(f"no answer within {bound_s:g} s")
        try:
            worked, value = self._connection.recv()
        except EOFError as error:
            raise SideFailed("the process ended") from error
        if not worked:
            raise SideFailed(value)
        return value


def _serve(
    connection: Connection, make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        served = make(*args, **options)
        connection.send((True, served.about))
    except Exception:
        connection.send((False, traceback.format_exc()))
        return
    while True:
        try:
            method, given = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, getattr(served, method)(*given)))
        except Exception:
            connection.send((False, traceback.format_exc()))
