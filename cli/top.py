"""`sluice top`: the mesh on one screen, renewed every two seconds.

It asks one gateway, which asks all processes over NATS: no metrics page need be open, and ssh or a forwarded port is
enough. The tables are made of two samples of the metrics of all processes.
"""

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from shutil import get_terminal_size
from typing import Final, Literal

from typer import Option

from cli import options, output
from cli.commands import wants_json
from cli.escaping import printable
from sluice.client.blocking import Client
from sluice.errors import SluiceError
from sluice.telemetry import names
from sluice.telemetry.catalog import METRICS
from sluice.v1.admin_pb2 import ListRequestsResponse, ReadMetricsResponse, RunningCount
from sluice.v1.inference_pb2 import Priority
from sluice.wire.clock import ms_of
from sluice.wire.enums import word_of

_WINDOW_S: Final = 30.0
"""Time that rates and percentiles cover, in seconds."""
_ONCE_S: Final = 1.0
_NAME_CHARS: Final = 21
"""Longest name that is shown on a terminal."""

_FIRST_TOKEN: Final = "gen_ai.server.time_to_first_token"
_TOKEN_TIME: Final = "gen_ai.server.time_per_output_token"
WANTED: Final = (
    "sluice.requests",
    "sluice.tokens",
    _FIRST_TOKEN,
    _TOKEN_TIME,
    "sluice.queue.tasks",
    "sluice.room.waiting",
    "sluice.queue.oldest_age",
    "sluice.worker.live",
    "sluice.worker.drained",
    "sluice.worker.slots",
    "sluice.worker.running",
    "sluice.worker.waiting",
    "sluice.worker.kv_cache.usage",
    "sluice.worker.tokens",
    "sluice.worker.prefix_cache.hits",
    "sluice.worker.step.duration",
    "sluice.jobs.running",
    "sluice.jobs.items",
)
"""Metrics that `sluice top` reads from the gateway."""
Sort = Literal["name", "running", "queue", "speed"]
_SORTS: Final[Mapping[Sort, tuple[str, ...]]] = {
    "name": (),
    "running": ("run", "rows"),
    "queue": ("queue", "wait"),
    "speed": ("req/s", "tok/s", "tokens"),
}
"""Columns, of which each table has one at most."""

Labels = tuple[str, ...]
Value = tuple[float, ...]
"""A number; of a histogram the sum, then the counts of its buckets."""
Cell = str | float | None
"""A text, a number, or None for what is not known."""
Row = dict[str, Cell]
"""Cells by column."""
_SHARED: Final = {"sluice.queue.oldest_age"}
"""Metrics of which the highest value of all processes counts; so it is with metrics that have a worker's address."""


def top(
    once: bool = Option(False, "--once", help="Print one screen, with rates of one second."),
    interval: float = Option(2.0, help="Time between screens.", metavar="SECONDS", min=0.5),
    sort: Sort = Option("name", help="What rows are sorted by."),
    text: str = Option("", "--filter", help="Only rows with this in a name.", metavar="TEXT"),
    address: options.Address = None,
) -> None:
    """Watch models, workers and tenants: load, speed, times.

    Ctrl-C leaves. TTFT is the time to the first token, ITL that between two tokens, STEP that of an engine step, all
    in ms; 50 and 95 are percentiles. OLDEST is in s. Figures are of the last 30 s. With --json, or into a file, it
    prints once.
    """
    with options.connect(address=address) as client, suppress(KeyboardInterrupt):
        if once or wants_json() or not output.can_move(sys.stdout):
            before = _sample(client)
            time.sleep(_ONCE_S)
            view = View(_sample(client), before, None)
            screen = lines(client.address, view, None, sys.maxsize, sort, text)
            output.show({"summary": view.summary(), **view.tables}, "\n".join(screen))
            return
        samples = deque["Sample"]()
        while True:
            size = get_terminal_size()
            try:
                samples.append(_sample(client))
                while samples[-1].at - samples[0].at > _WINDOW_S:
                    samples.popleft()
                earlier = samples[0] if len(samples) > 1 else None
                view = View(samples[-1], earlier, earlier)
                screen = lines(client.address, view, size.columns, size.lines, sort, text)
            except SluiceError as error:
                screen = [f"sluice top  {client.address}", f"no answer: {error.message}"]
            # Each line is erased behind its text, so nothing flickers.
            print("\x1b[H" + "\x1b[K\n".join(map(printable, screen)), end="\x1b[J", flush=True)
            time.sleep(interval)


def _sample(client: Client) -> "Sample":
    read = client.metrics(*WANTED)
    return Sample.of(time.monotonic(), read, client.requests(limit=0))


@dataclass(frozen=True)
class Sample:
    """What all processes had counted `at` some time, seconds."""

    at: float
    values: Mapping[str, Mapping[tuple[str, Labels], Value]]
    """By metric; by process and labels."""
    processes: Sequence[tuple[str, str]]
    """Kind and id."""
    running: ListRequestsResponse

    @classmethod
    def of(cls, at: float, read: ReadMetricsResponse, running: ListRequestsResponse) -> "Sample":
        """Build a sample from two replies of a gateway."""
        values: dict[str, dict[tuple[str, Labels], Value]] = {}
        for process in read.processes:
            for series in process.metrics:
                points = values.setdefault(series.name, {})
                for point in series.points:
                    points[process.instance, tuple(point.labels)] = (point.value, *point.buckets)
        processes = [(process.service, process.instance) for process in read.processes]
        return cls(at, values, processes, running)

    def since(self, before: "Sample | None", metric: str) -> dict[Labels, Value]:
        """Return how much a counter or histogram has grown; a process that is not in `before` is left out.

        Without `before`: since the processes started, which for a gauge is its value.
        """
        earlier = {} if before is None else before.values.get(metric, {})
        grown = []
        for key, value in self.values.get(metric, {}).items():
            if before is None or key in earlier:
                old = earlier.get(key, (0.0,) * len(value))
                changes = tuple(new - was for new, was in zip(value, old, strict=True))
                # A process that has started again counts from 0.
                grown.append((key[1], value if min(changes) < 0 else changes))
        return _merged(metric, grown)


def _merged(metric: str, points: Iterable[tuple[Labels, Value]]) -> dict[Labels, Value]:
    """Return the values of all processes by labels."""
    highest = metric in _SHARED or names.WORKER_ADDRESS in METRICS[metric].labels
    together: dict[Labels, list[Value]] = {}
    for labels, value in points:
        together.setdefault(labels, []).append(value)
    return {
        labels: max(values) if highest else tuple(map(sum, zip(*values, strict=True)))
        for labels, values in together.items()
    }


class View:
    """The tables of one moment."""

    def __init__(self, sample: Sample, before: Sample | None, earlier: Sample | None) -> None:
        """Rates are since `before`, percentiles since `earlier` (None: since the processes started)."""
        self._sample, self._before, self._earlier = sample, before, earlier
        self.tables: Mapping[str, list[Row]] = {
            "models": self._models(),
            "workers": self._workers(),
            "tenants": self._tenants(),
        }

    def summary(self) -> dict[str, float | None]:
        """Return the mesh in a few numbers."""
        tokens, requests = self._rates("sluice.worker.tokens"), self._rates("sluice.requests")
        counts = self._sample.running.counts
        return {
            "running": sum(count.requests for count in counts),
            "waiting": sum(one.waiting for one in counts),
            "requests_per_s": _total(requests),
            "errors_per_s": _total(requests, (), _is_error),
            "input_tokens_per_s": _total(tokens, (), lambda one: one[-1] == "input"),
            "output_tokens_per_s": _total(tokens, (), lambda one: one[-1] == "output"),
            "jobs": float(sum(self._now("sluice.jobs.running").values())),
            "items_per_s": _total(self._rates("sluice.jobs.items")),
        }

    def processes(self) -> str:
        """Return the number of processes of each kind."""
        kinds = [service.removeprefix("sluice-") for service, _ in self._sample.processes]
        return ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))

    def _now(self, metric: str) -> dict[Labels, float]:
        return {labels: value[0] for labels, value in self._sample.since(None, metric).items()}

    def _rates(self, metric: str) -> dict[Labels, float] | None:
        """By second; None while there is one sample."""
        if self._before is None:
            return None
        seconds = max(self._sample.at - self._before.at, 1e-3)
        grown = self._sample.since(self._before, metric)
        return {labels: value[0] / seconds for labels, value in grown.items()}

    def _models(self) -> list[Row]:
        now, requests = self._now, self._rates("sluice.requests")
        queued, waiting = now("sluice.queue.tasks"), now("sluice.room.waiting")
        oldest = now("sluice.queue.oldest_age")
        first, token = self._times(_FIRST_TOKEN), self._times(_TOKEN_TIME)
        running: Counter[Labels] = Counter()
        for count in self._sample.running.counts:
            running[count.model, word_of(Priority, count.priority)] += count.requests
        return [
            {
                "model": labels[0],
                "class": labels[1],
                "run": running[labels],
                "queue": queued.get(labels, 0.0) + waiting.get(labels, 0.0),
                "oldest_s": oldest.get(labels),
                "req/s": _total(requests, labels),
                "err/s": _total(requests, labels, _is_error),
                "ttft50": _ms(_FIRST_TOKEN, first.get(labels), 0.5),
                "ttft95": _ms(_FIRST_TOKEN, first.get(labels), 0.95),
                "itl50": _ms(_TOKEN_TIME, token.get(labels), 0.5),
            }
            for labels in sorted({*queued, *waiting, *first, *running})
            if labels[1] == "interactive"
            or labels in first
            or any(counts.get(labels) for counts in (running, queued, waiting))
        ]

    def _times(self, metric: str) -> dict[Labels, Value]:
        """Return a histogram by model and class, over operations."""
        place = METRICS[metric].labels.index(names.GEN_AI_RESPONSE_MODEL)
        grown = self._sample.since(self._earlier, metric)
        return _merged(
            metric, ((labels[place : place + 2], value) for labels, value in grown.items())
        )

    def _workers(self) -> list[Row]:
        now, tokens = self._now, self._rates("sluice.worker.tokens")
        live, drained = now("sluice.worker.live"), now("sluice.worker.drained")
        running, slots = now("sluice.worker.running"), now("sluice.worker.slots")
        waiting, cache = now("sluice.worker.waiting"), now("sluice.worker.kv_cache.usage")
        steps = self._sample.since(self._before, "sluice.worker.step.duration")
        hits = self._sample.since(self._earlier, "sluice.worker.prefix_cache.hits")
        read = self._sample.since(self._earlier, "sluice.worker.tokens")
        rows: list[Row] = []
        for labels in sorted(live):
            total_s, *counts = steps.get(labels, (0.0,))
            (prompt,), (prefix,) = read.get((*labels, "input"), (0.0,)), hits.get(labels, (0.0,))
            state = "live" if live[labels] else "lost"
            rows.append(
                {
                    "worker": labels[1],
                    "model": labels[0],
                    "state": "drained" if drained.get(labels) else state,
                    "rows": running.get(labels),
                    "slots": slots.get(labels),
                    "wait": waiting.get(labels),
                    "kv%": 100 * cache[labels] if labels in cache else None,
                    "hits%": 100 * prefix / prompt if prefix and prompt else None,
                    "step": 1e3 * total_s / sum(counts) if sum(counts) else None,
                    "tok/s": _total(tokens, (*labels, "output")),
                }
            )
        return rows

    def _tenants(self) -> list[Row]:
        counts: dict[str, list[RunningCount]] = {}
        for count in self._sample.running.counts:
            counts.setdefault(count.tenant, []).append(count)
        return [
            {
                "tenant": name,
                "run": sum(one.requests for one in mine),
                "wait": sum(one.waiting for one in mine),
                "tokens": sum(one.completion_tokens for one in mine),
                "oldest_s": max(ms_of(one.oldest_age) for one in mine) / 1e3,
            }
            for name, mine in counts.items()
        ]


def lines(
    address: str, view: View, width: int | None, height: int, sort: Sort = "name", text: str = ""
) -> list[str]:
    """Return a screen of `height` lines at most, with the rows that have `text` in a name; no width, no cut."""
    numbers = (
        f"{name.replace('_per_s', '/s')} {output.cell(value)}"
        for name, value in view.summary().items()
    )
    screen = [
        f"sluice top  {address}  {view.processes()}",
        *output.folded("  ".join(numbers), 2).split("\n"),
    ]

    def place(row: Row) -> tuple[float, list[str]]:
        return -sum(float(row.get(column) or 0.0) for column in _SORTS[sort]), _names(row)

    for rows in view.tables.values():
        if matching_rows := [row for row in rows if any(text in name for name in _names(row))]:
            screen += ["", *_table(sorted(matching_rows, key=place), width)]
    if len(screen) > height:
        more = len(screen) - height + 1
        screen[height - 1 :] = [f"... {more} more lines; --filter leaves some out"]
    return screen if width is None else [line[:width] for line in screen]


def _table(rows: Sequence[Row], width: int | None) -> list[str]:
    """Return the lines of a table; where it does not fit, names are shortened and its last columns left out."""
    columns, chars = list(rows[0]), sys.maxsize if width is None else _NAME_CHARS
    while True:
        headers = [name.removesuffix("_s").upper() for name in columns]
        cells = [[_shortened(row[name], chars) for name in columns] for row in rows]
        table = output.aligned(headers, cells)
        if width is None or max(map(len, table)) <= width or len(columns) == 1:
            return table
        columns.pop()


def _names(row: Row) -> list[str]:
    return [cell for cell in row.values() if isinstance(cell, str)]


def _shortened(cell: Cell, chars: int) -> Cell:
    """Return a cell; of a name that is too long its end, which tells names apart."""
    return f"~{cell[1 - chars :]}" if isinstance(cell, str) and len(cell) > chars else cell


def quantile(metric: str, value: Value, share: float) -> float | None:
    """Return the time that `share` of the measurements did not exceed, by its bucket; None without measurements."""
    counts, bounds = value[1:], METRICS[metric].bounds
    rank = share * sum(counts)
    if not rank:
        return None
    totals = list(accumulate(counts))
    place = next(place for place, total in enumerate(totals) if total >= rank)
    if place == len(bounds):
        return bounds[-1]
    below = bounds[place - 1] if place else 0.0
    part = 1 - (totals[place] - rank) / counts[place]
    return below + part * (bounds[place] - below)


def _ms(metric: str, value: Value | None, share: float) -> float | None:
    seconds = None if value is None else quantile(metric, value, share)
    return None if seconds is None else 1e3 * seconds


def _is_error(labels: Labels) -> bool:
    """Return whether the outcome is an error: its reason is in upper case, a finish reason is not."""
    return labels[-1].isupper()


def _total(
    values: Mapping[Labels, float] | None,
    first: Labels = (),
    predicate: Callable[[Labels], bool] = lambda _: True,
) -> float | None:
    """Return the sum over labels that begin with `first`."""
    if values is None:
        return None
    matching = (labels for labels in values if labels[: len(first)] == first and predicate(labels))
    return sum(values[labels] for labels in matching)
