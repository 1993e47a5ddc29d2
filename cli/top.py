"""`sluice top`: the mesh on one screen, renewed every two seconds.

It asks one gateway, which asks all processes over NATS: no metrics page need be open, and ssh or a forwarded port is
enough. It writes lines by itself: a library for screens takes more of the core than all the rest.
"""

import contextlib
import os
import select
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

from cli import options, output
from cli.commands import option, wants_json
from cli.top_view import SORTS, WANTED, Choice, Sample, Sort, View, lines
from sluice.client.blocking import Client
from sluice.errors import SluiceError

_RATE_S: Final = 10.0
"""Rates are means over this time, seconds."""
_QUANTILE_S: Final = 60.0
"""Percentiles are of this time, seconds."""
_ONCE_S: Final = 1.0


def top(
    once: bool = option(False, "Print one screen; rates are those of one second."),
    interval: float = option(2.0, "Time between two screens.", metavar="SECONDS", min=0.5),
    sort: Sort = option("name", "What rows are sorted by."),
    text: str = option("", "Only rows with this in a name.", "--filter", metavar="TEXT"),
    address: options.Address = options.ADDRESS,
) -> None:
    """Show models, workers and tenants: what runs and waits, tokens per second, times. Keys are on the last line.

    TTFT, ITL and STEP are milliseconds. With --json, or into a file, it prints once.
    """
    choice = Choice(sort=sort, text=text)
    with Client(address) as client:
        if once or wants_json() or not sys.stdout.isatty():
            _print_once(client, address, choice)
        else:
            with _screen(), contextlib.suppress(KeyboardInterrupt):
                _Live(client, address, choice, interval).run()


def _sample(client: Client) -> Sample:
    read = client.metrics(*(metric.name for metric in WANTED))
    return Sample.of(time.monotonic(), read, client.requests(limit=0))


def _print_once(client: Client, address: str, choice: Choice) -> None:
    before = _sample(client)
    time.sleep(_ONCE_S)
    view = View(_sample(client), before, None)
    tables = {name: table.objects() for name, table in view.tables.items()}
    width, _ = shutil.get_terminal_size()
    screen = lines(f"sluice top  {address}", view, choice, width, sys.maxsize)
    output.show({"summary": view.summary(), **tables}, "\n".join(screen))


class _Live:
    """The screen, until q."""

    def __init__(self, client: Client, address: str, choice: Choice, interval_s: float) -> None:
        self._client = client
        self._address = address
        self._choice = choice
        self._interval_s = interval_s
        self._samples: deque[Sample] = deque()
        self._typing = self._paused = False
        self._problem = ""

    def run(self) -> None:
        next_at = time.monotonic()
        while True:
            if time.monotonic() >= next_at:
                next_at = time.monotonic() + self._interval_s
                if not self._paused:
                    self._take()
            self._draw()
            if self._wait_for_key(max(0.0, next_at - time.monotonic())) == "q":
                return

    def _take(self) -> None:
        try:
            self._samples.append(_sample(self._client))
            self._problem = ""
        except SluiceError as error:
            self._problem = f"no answer: {error.message}"
            return
        while self._samples[-1].at - self._samples[0].at > _QUANTILE_S:
            self._samples.popleft()

    def _wait_for_key(self, timeout_s: float) -> str:
        """Acts on the next key; empty when none came."""
        if not select.select([sys.stdin], [], [], timeout_s)[0]:
            return ""
        key = os.read(sys.stdin.fileno(), 1).decode(errors="replace")
        choice = self._choice
        if self._typing:
            self._type(key)
            return ""
        match key:
            case "s":
                choice.sort = SORTS[(SORTS.index(choice.sort) + 1) % len(SORTS)]
            case "r":
                choice.reverse = not choice.reverse
            case "p":
                self._paused = not self._paused
            case "/":
                self._typing, choice.text = True, ""
            case "1" | "2" | "3":
                choice.hidden ^= {int(key)}
        return key or "q"  # an end of input

    def _type(self, key: str) -> None:
        """A key of the filter."""
        if key in ("\r", "\n", ""):
            self._typing = False
        elif key == "\x1b":
            self._typing, self._choice.text = False, ""
        elif key in ("\x7f", "\b"):
            self._choice.text = self._choice.text[:-1]
        else:
            self._choice.text += key

    def _draw(self) -> None:
        width, height = shutil.get_terminal_size()
        shown = [f"sluice top  {self._address}"]
        if self._samples:
            last = self._samples[-1]
            earlier = [one for one in self._samples if one is not last]
            before = next((one for one in earlier if last.at - one.at <= _RATE_S), None)
            view = View(last, before, earlier[0] if earlier else None)
            shown = lines(shown[0], view, self._choice, width, height - 1)
        shown += [""] * (height - 1 - len(shown))
        shown.append(self._status()[: width - 1])
        # Each line is erased behind its text, so nothing flickers.
        sys.stdout.write("\x1b[H" + "\x1b[K\r\n".join(shown) + "\x1b[K")
        sys.stdout.flush()

    def _status(self) -> str:
        if self._problem:
            return self._problem
        if self._typing:
            return f"/{self._choice.text}_"
        pause, text = "PAUSED" if self._paused else "pause", self._choice.text or "filter"
        return f"q quit  s sort: {self._choice.sort}  r reverse  / {text}  1 2 3 hide  p {pause}"


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """The terminal's second screen, keys one by one; as it was at the end."""
    import termios
    import tty

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard) if sys.stdin.isatty() else None
    sys.stdout.write("\x1b[?1049h\x1b[?25l")
    try:
        if before is not None:
            tty.setcbreak(keyboard)
        yield
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
        if before is not None:
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
