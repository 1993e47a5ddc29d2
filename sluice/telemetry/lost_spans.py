"""Marks in traces whose spans may have been lost with a process that was killed.

A process sends its spans a moment after a row has ended there. Killed in that moment, it takes them along, and the
trace of an answer that was complete lacks them. Who had the row from it lives, and says so with a span of its own.
"""

from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from opentelemetry.trace import Tracer

from sluice.telemetry import names
from sluice.telemetry.tracing import EXPORT_DELAY_MS, context_of, is_unsampled

UNSENT_S: Final = 2.0 + 3 * EXPORT_DELAY_MS / 1e3
"""How long a row is remembered unless said otherwise: what a process may keep its spans, and the loss of it may go
unnoticed; seconds."""
ROWS_MAX: Final = 20_000


class _Row(NamedTuple):
    process: str
    headers: Mapping[str, str]
    at: float


class RecentRows:
    """Rows that have just ended at other processes of one ``kind``: "worker", "batcher" or "gateway"."""

    def __init__(self, tracer: Tracer, kind: str, keep_s: float = UNSENT_S) -> None:
        """``keep_s``: how long a row is remembered."""
        self._tracer = tracer
        self._kind = kind
        self._keep_s = keep_s
        self._rows: deque[_Row] = deque(maxlen=ROWS_MAX)

    def ended(self, process: str, headers: Mapping[str, str], now: float) -> None:
        """A row ended at ``process``; its spans hang under the context in ``headers``."""
        self._expire(now)
        if headers and not is_unsampled(headers):
            self._rows.append(_Row(process, headers, now))

    def lost(self, process: str, now: float) -> None:
        """``process`` is lost, maybe with spans of these rows: each of their traces says so."""
        kept: deque[_Row] = deque(maxlen=ROWS_MAX)
        for row in self._rows:
            if row.process != process:
                kept.append(row)
            elif row.at >= now - self._keep_s:
                self._tracer.start_span(
                    names.SPAN_INCOMPLETE,
                    context_of(row.headers),
                    attributes={names.INCOMPLETE_FROM: self._kind},
                ).end()
        self._rows = kept

    def processes(self, now: float) -> set[str]:
        """Those with rows that are remembered."""
        self._expire(now)
        return {row.process for row in self._rows}

    def forget(self, process: str) -> None:
        """``process`` has sent its spans."""
        self._rows = deque((row for row in self._rows if row.process != process), maxlen=ROWS_MAX)

    def _expire(self, now: float) -> None:
        while self._rows and self._rows[0].at < now - self._keep_s:
            self._rows.popleft()
