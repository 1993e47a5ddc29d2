"""A side of a comparison in a process of its own, which sleeps while another side runs; how long answers take."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, TypeVar

from supervisor.triton import HUGE_PAGES

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
        # Every side has the memory of a worker.
        os.environ |= {**HUGE_PAGES, **os.environ}
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


Prompts = Sequence[Sequence[int]]
Generate = Callable[[Prompts, int], list[list[int]]]

Made = TypeVar("Made")


def timed(generate: Generate, prompts: Prompts, new_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds, and the answers, of which each has all its tokens."""
    start = time.perf_counter()
    answers = generate(prompts, new_tokens)
    took_s = time.perf_counter() - start
    assert [len(answer) for answer in answers] == [new_tokens] * len(prompts)
    return took_s, answers


def fastest(
    settings: Iterable[dict[str, Any]],
    make: Callable[..., Made],
    trial: Callable[[Made], float],
) -> tuple[Made, str]:
    """What ``make`` makes of the settings whose second trial takes the fewest seconds, and all trials in words."""
    best: tuple[float, Made] | None = None
    told = []
    for setting in settings:
        made = make(**setting)
        trial(made)
        took_s = trial(made)
        told.append(f"{_words(setting)} {took_s:.3g} s")
        if best is None or took_s < best[0]:
            if best is not None:
                _close(best[1])
            best = (took_s, made)
        else:
            _close(made)
    assert best is not None
    return best[1], "tried " + ", ".join(told)


def _close(made: Any) -> None:
    """What is not the fastest gives its memory back."""
    if hasattr(made, "close"):
        made.close()


def _words(setting: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in setting.items()) or "defaults"
