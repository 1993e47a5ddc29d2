"""What `sluice top` shows: tables from two samples of the metrics of all processes. Neither I/O nor a clock."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, Literal, get_args

from sluice.telemetry import catalog, names
from sluice.telemetry.catalog import Metric
from sluice.v1.admin_pb2 import ListRequestsResponse, ReadMetricsResponse
from sluice.v1.inference_pb2 import Priority
from sluice.wire.clock import ms_of
from sluice.wire.enums import word_of

WANTED: Final = (
    *(catalog.REQUESTS, catalog.TOKENS, catalog.FIRST_TOKEN, catalog.TOKEN_TIME),
    *(catalog.QUEUED, catalog.ROOM_WAITING, catalog.OLDEST),
    *(catalog.WORKER_LIVE, catalog.WORKER_DRAINED, catalog.WORKER_SLOTS, catalog.WORKER_RUNNING),
    *(catalog.WORKER_WAITING, catalog.WORKER_CACHE, catalog.WORKER_TOKENS, catalog.PREFIX_HITS),
    *(catalog.STEP_TIME, catalog.JOBS_RUNNING, catalog.JOB_ITEMS),
)
"""The metrics that it reads."""
Sort = Literal["name", "running", "queue", "speed"]
SORTS: Final[tuple[Sort, ...]] = get_args(Sort)

Labels = tuple[str, ...]
Value = tuple[float, ...]
"""A number; of a histogram the sum, then the counts of its buckets."""
Cell = str | float | None
"""A text, a number, or None for what is not known."""
_SHARED: Final = {catalog.OLDEST.name}
"""The highest counts; so it is with workers."""


@dataclass(frozen=True)
class Sample:
    """What all processes had counted ``at`` some time, seconds."""

    at: float
    values: Mapping[str, Mapping[tuple[str, Labels], Value]]
    """By metric; by process and labels."""
    processes: Sequence[tuple[str, str]]
    """Kind and id."""
    running: ListRequestsResponse

    @classmethod
    def of(cls, at: float, read: ReadMetricsResponse, running: ListRequestsResponse) -> "Sample":
        """From the two answers of a gateway."""
        values: dict[str, dict[tuple[str, Labels], Value]] = {}
        for process in read.processes:
            for series in process.metrics:
                points = values.setdefault(series.name, {})
                for one in series.points:
                    points[process.instance, tuple(one.labels)] = (one.value, *one.buckets)
        processes = [(process.service, process.instance) for process in read.processes]
        return cls(at, values, processes, running)

    def now(self, metric: Metric) -> dict[Labels, float]:
        """A gauge, over all processes."""
        found = self.values.get(metric.name, {})
        merged = _merged(metric, ((labels, value) for (_, labels), value in found.items()))
        return {labels: value[0] for labels, value in merged.items()}

    def since(self, before: "Sample | None", metric: Metric) -> dict[Labels, Value]:
        """How much a counter or histogram has grown; a process that is not in ``before`` is left out.

        Without ``before``: since the processes started.
        """
        earlier = {} if before is None else before.values.get(metric.name, {})
        grown = []
        for key, value in self.values.get(metric.name, {}).items():
            if before is None or key in earlier:
                old = earlier.get(key, (0.0,) * len(value))
                changes = tuple(new - was for new, was in zip(value, old, strict=True))
                # A process that has started again counts from 0.
                grown.append((key[1], value if min(changes) < 0 else changes))
        return _merged(metric, grown)


def _merged(metric: Metric, found: Iterable[tuple[Labels, Value]]) -> dict[Labels, Value]:
    """The values of all processes by labels."""
    highest = metric.name in _SHARED or names.WORKER_ADDRESS in metric.labels
    together: dict[Labels, Value] = {}
    for labels, value in found:
        known = together.get(labels, value if highest else (0.0,) * len(value))
        together[labels] = (
            max(known, value) if highest else tuple(map(sum, zip(known, value, strict=True)))
        )
    return together


def quantile(metric: Metric, value: Value, share: float) -> float | None:
    """The time that ``share`` of the measurements did not exceed, by its bucket; None without measurements."""
    counts = value[1:]
    wanted = share * sum(counts)
    if not wanted:
        return None
    totals = list(accumulate(counts))
    place = next(place for place, total in enumerate(totals) if total >= wanted)
    if place == len(metric.bounds):
        return metric.bounds[-1]
    below = metric.bounds[place - 1] if place else 0.0
    part = 1 - (totals[place] - wanted) / counts[place]
    return below + part * (metric.bounds[place] - below)


@dataclass
class Table:
    """Rows under a header."""

    columns: Sequence[tuple[str, int]]
    """Names, and widths of which 80 columns hold all."""
    rows: list[list[Cell]]
    sorts: Mapping[str, int]
    """Which column a word of `SORTS` means, besides "name"."""

    def ordered(self, sort: str, *, reverse: bool, text: str) -> list[list[Cell]]:
        """The rows with ``text`` in a name, sorted."""
        shown = [row for row in self.rows if any(isinstance(c, str) and text in c for c in row)]
        shown.sort(key=lambda row: [cell for cell in row if isinstance(cell, str)])
        if sort in self.sorts:
            shown.sort(key=lambda row: _number(row[self.sorts[sort]]), reverse=True)
        return shown[::-1] if reverse else shown

    def objects(self) -> list[dict[str, Cell]]:
        """For programs."""
        keys = [name.lower() for name, _ in self.columns]
        return [dict(zip(keys, row, strict=True)) for row in self.rows]


def _number(cell: Cell) -> float:
    return float(cell) if isinstance(cell, int | float) else -1.0


@dataclass
class Choice:
    """What the person at the keyboard has chosen."""

    sort: Sort = "name"
    reverse: bool = False
    text: str = ""
    hidden: set[int] = field(default_factory=set)


class View:
    """The tables of one moment."""

    def __init__(self, sample: Sample, before: Sample | None, earlier: Sample | None) -> None:
        """Rates are since ``before``, percentiles since ``earlier`` (None: since the processes started)."""
        self._sample, self._before, self._earlier = sample, before, earlier
        self.tables = {
            "models": self._models(),
            "workers": self._workers(),
            "tenants": self._tenants(),
        }

    def summary(self) -> dict[str, float | None]:
        """The mesh in a few numbers."""
        tokens, jobs = self._rates(catalog.WORKER_TOKENS), self._sample.now(catalog.JOBS_RUNNING)
        counts = self._sample.running.counts
        return {
            "running": sum(one.requests for one in counts),
            "waiting": sum(one.waiting for one in counts),
            "requests_per_s": _total(self._rates(catalog.REQUESTS)),
            "errors_per_s": _total(self._rates(catalog.REQUESTS), (), _is_error),
            "input_tokens_per_s": _total(tokens, (), lambda one: one[-1] == "input"),
            "output_tokens_per_s": _total(tokens, (), lambda one: one[-1] == "output"),
            "jobs": sum(jobs.values()) if jobs else 0.0,
            "items_per_s": _total(self._rates(catalog.JOB_ITEMS)),
        }

    def processes(self) -> str:
        """How many of each kind there are."""
        kinds = [service.removeprefix("sluice-") for service, _ in self._sample.processes]
        return ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))

    def _rates(self, metric: Metric) -> dict[Labels, float] | None:
        """By second; None while there is one sample."""
        if self._before is None:
            return None
        seconds = max(self._sample.at - self._before.at, 1e-3)
        grown = self._sample.since(self._before, metric)
        return {labels: value[0] / seconds for labels, value in grown.items()}

    def _models(self) -> Table:
        now, requests = self._sample.now, self._rates(catalog.REQUESTS)
        queued, waiting, oldest = map(now, (catalog.QUEUED, catalog.ROOM_WAITING, catalog.OLDEST))
        first, token = self._times(catalog.FIRST_TOKEN), self._times(catalog.TOKEN_TIME)
        running: Counter[Labels] = Counter()
        for one in self._sample.running.counts:
            running[one.model, word_of(Priority, one.priority)] += one.requests
        rows: list[list[Cell]] = [
            [
                *labels,
                running[labels],
                queued.get(labels, 0.0) + waiting.get(labels, 0.0),
                oldest.get(labels),
                _total(requests, labels),
                _total(requests, labels, _is_error),
                *(_ms(catalog.FIRST_TOKEN, first.get(labels), share) for share in (0.5, 0.95)),
                _ms(catalog.TOKEN_TIME, token.get(labels), 0.5),
            ]
            for labels in sorted({*queued, *waiting, *first, *running})
            if labels[1] == "interactive"
            or labels in first
            or any(counts.get(labels) for counts in (running, queued, waiting))
        ]
        return Table(_MODELS, rows, {"running": 2, "queue": 3, "speed": 5})

    def _times(self, metric: Metric) -> dict[Labels, Value]:
        """A histogram by model and class, over operations."""
        place = metric.labels.index(names.GEN_AI_RESPONSE_MODEL)
        grown = self._sample.since(self._earlier, metric)
        return _merged(
            metric, ((labels[place : place + 2], value) for labels, value in grown.items())
        )

    def _workers(self) -> Table:
        sample = self._sample
        live, drained, running, slots, waiting, cache = map(
            sample.now,
            (
                *(catalog.WORKER_LIVE, catalog.WORKER_DRAINED, catalog.WORKER_RUNNING),
                *(catalog.WORKER_SLOTS, catalog.WORKER_WAITING, catalog.WORKER_CACHE),
            ),
        )
        tokens = self._rates(catalog.WORKER_TOKENS)
        steps = sample.since(self._before, catalog.STEP_TIME)
        hits = sample.since(self._earlier, catalog.PREFIX_HITS)
        read = sample.since(self._earlier, catalog.WORKER_TOKENS)
        rows: list[list[Cell]] = []
        for labels in sorted(live):
            step, found, prompt = (
                *(steps.get(labels), hits.get(labels)),
                read.get((*labels, "input"), (0.0,))[0],
            )
            state = "live" if live[labels] else "lost"
            rows.append(
                [
                    *(labels[1], labels[0], "drained" if drained.get(labels) else state),
                    *(counts.get(labels) for counts in (running, slots, waiting)),
                    _percent(cache.get(labels)),
                    _percent(found[0] / prompt if found and prompt else None),
                    1e3 * step[0] / sum(step[1:]) if step and sum(step[1:]) else None,
                    _total(tokens, (*labels, "output")),
                ]
            )
        return Table(_WORKERS, rows, {"running": 3, "queue": 5, "speed": 9})

    def _tenants(self) -> Table:
        found: dict[str, list[float]] = {}
        for one in self._sample.running.counts:
            row = found.setdefault(one.tenant, [0.0, 0.0, 0.0, 0.0])
            row[0] += one.requests
            row[1] += one.waiting
            row[2] += one.completion_tokens
            row[3] = max(row[3], ms_of(one.oldest_age) / 1e3)
        rows: list[list[Cell]] = [[name, *row] for name, row in found.items()]
        return Table(_TENANTS, rows, {"running": 1, "queue": 2, "speed": 3})


_MODELS: Final = (
    *(("MODEL", 13), ("CLASS", 11), ("RUN", 4), ("QUEUE", 5), ("OLDEST_S", 8)),
    *(("REQ/S", 6), ("ERR/S", 5), ("TTFT50", 6), ("TTFT95", 6), ("ITL50", 6)),
)
_WORKERS: Final = (
    *(("WORKER", 21), ("MODEL", 9), ("STATE", 7), ("ROWS", 4), ("SLOTS", 5), ("WAIT", 4)),
    *(("KV%", 4), ("HITS%", 5), ("STEP", 5), ("TOK/S", 6)),
)
_TENANTS: Final = (("TENANT", 24), ("RUN", 6), ("WAIT", 6), ("TOKENS", 9), ("OLDEST_S", 9))


def lines(title: str, view: View, choice: Choice, width: int, height: int) -> list[str]:
    """The screen: at most ``height`` lines of at most ``width`` characters."""
    shown = [f"{title}  {view.processes()}", _numbers(view.summary())]
    for number, table in enumerate(view.tables.values(), 1):
        if number in choice.hidden or not table.rows:
            continue
        rows = table.ordered(choice.sort, reverse=choice.reverse, text=choice.text)
        shown += ["", _line(table, [name for name, _ in table.columns])]
        shown += [_line(table, row) for row in rows]
    if len(shown) > height:
        more = len(shown) - height + 1
        shown[height - 1 :] = [f"... {more} more lines; / filters, 1 2 3 hide a table"]
    return [line[:width] for line in shown]


def _numbers(found: Mapping[str, float | None]) -> str:
    text = (
        f"running {_cell(found['running'])}  waiting {_cell(found['waiting'])}"
        f"  req/s {_cell(found['requests_per_s'])}  err/s {_cell(found['errors_per_s'])}"
        f"  tok/s in {_cell(found['input_tokens_per_s'])} out {_cell(found['output_tokens_per_s'])}"
    )
    if found["jobs"]:
        text += f"  jobs {_cell(found['jobs'])}: {_cell(found['items_per_s'])}/s"
    return text


def _line(table: Table, row: Sequence[Cell]) -> str:
    cells = []
    for place, ((_, width), cell) in enumerate(zip(table.columns, row, strict=True)):
        text = _cell(cell)
        if isinstance(table.rows[0][place], str):
            cells.append(_short(text, width).ljust(width))
        else:
            cells.append(text.rjust(width))
    return " ".join(cells).rstrip()


def _short(text: str, width: int) -> str:
    """Its end, which tells names apart, when it is too long."""
    return text if len(text) <= width else f"~{text[1 - width :]}"


def _cell(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    return f"{cell:.1f}" if 0 < cell < 100 and cell != int(cell) else f"{cell:.0f}"


def _ms(metric: Metric, value: Value | None, share: float) -> float | None:
    seconds = None if value is None else quantile(metric, value, share)
    return None if seconds is None else 1e3 * seconds


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _is_error(labels: Labels) -> bool:
    """Whether the outcome is the reason of an error: finish reasons are in lower case."""
    return labels[-1].isupper()


def _total(
    found: Mapping[Labels, float] | None,
    first: Labels = (),
    wanted: Callable[[Labels], bool] = lambda _: True,
) -> float | None:
    """The sum over labels that begin with ``first``."""
    if found is None:
        return None
    matching = (labels for labels in found if labels[: len(first)] == first and wanted(labels))
    return sum(found[labels] for labels in matching)
