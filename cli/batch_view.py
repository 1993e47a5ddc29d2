"""Jobs as people and programs see them: objects for --json, tables, and their progress."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from shutil import get_terminal_size
from typing import Any, Final

from cli import output
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import ms_of
from sluice.wire.enums import word_of

_TIMES: Final = ("create_time", "start_time", "end_time")
_LISTED: Final = ("job", "name", "state", "created", "finished", "done", "failed", "left", "cost")


def state_of(job: pb.Job) -> str:
    """Return the state of a job as a word, for example "running"."""
    return word_of(pb.JobState, job.state)


def job_object(job: pb.Job) -> dict[str, Any]:
    """Return a job as JSON: times in seconds since the Unix epoch, durations in seconds."""
    return {
        "id": job.id,
        "name": job.spec.name,
        "model": job.spec.model,
        "state": state_of(job),
        "reason": job.reason,
        "reason_code": job.reason_code,
        "closing": job.closing,
        "progress": output.message_object(job.progress),
        **{name: ms_of(getattr(job, name)) / 1e3 for name in _TIMES if job.HasField(name)},
        "report": output.message_object(job.report) if job.HasField("report") else None,
        "runner": job.runner,
        "nats_last_sequence": job.nats_last_sequence,
    }


def letter_object(result: pb.JobResult) -> dict[str, Any]:
    """Return a dead letter as JSON."""
    return {
        "index": result.index,
        "line": result.line,
        "custom_id": result.custom_id,
        "attempts": result.attempts,
        "reason": result.error.reason,
        "message": result.error.message,
        "request_id": result.error.request_id,
    }


def write_list(jobs: list[pb.Job]) -> None:
    """Print jobs, one a row, with the times of their creation and end."""
    rows = []
    for job in jobs:
        times = (_time(job, name) for name in ("create_time", "end_time"))
        start = (job.id, job.spec.name or None, state_of(job), *times)
        rows.append((*start, _done(job), job.progress.dead, _left(job), _cost(job)))
    output.write_table(_LISTED, rows)


def _time(job: pb.Job, field: str) -> str | None:
    """Return a time of a job as a person here reads it; None before it."""
    if not job.HasField(field):  # type: ignore[arg-type]
        return None
    at = datetime.fromtimestamp(ms_of(getattr(job, field)) / 1e3)
    return f"{at:%H:%M:%S}" if at.date() == datetime.now().date() else f"{at:%Y-%m-%d %H:%M}"


def sentence(job: pb.Job) -> str:
    """Say how far a job is, in one line."""
    parts = [state_of(job), f"{_done(job)} done", f"{job.progress.dead} failed"]
    if left := _left(job):
        parts.append(f"{left} left")
    speed = job.report if job.HasField("report") else job.progress
    parts += [f"{speed.items_per_second:.1f} items/s", f"{speed.tokens_per_second:.0f} tokens/s"]
    return " · ".join((*parts, f"cost {_cost(job)}"))


@contextmanager
def display(is_watched: bool) -> Iterator[Callable[[pb.Job], None]]:
    """If `is_watched`, show a job's progress on stderr: one line on a terminal, else one for each state and tenth."""
    live, last = output.can_move(sys.stderr), (0, 0)

    def update(job: pb.Job) -> None:
        nonlocal last
        progress = job.progress
        now = (job.state, 10 * (progress.succeeded + progress.dead) // max(1, progress.total))
        if is_watched and (live or now != last):
            last = now
            text = f"{job.id}: {sentence(job)}"
            if live:
                text = f"\r\x1b[K{text[: get_terminal_size().columns - 1]}"
            print(text, end="" if live else "\n", file=sys.stderr, flush=True)

    try:
        yield update
    finally:
        if is_watched and live:
            print(file=sys.stderr)


def _done(job: pb.Job) -> str:
    """Return the items that are done, of those that are known so far."""
    progress = job.progress
    more = "" if progress.total_final else "+"
    return f"{progress.succeeded + progress.dead}/{progress.total}{more}"


def _left(job: pb.Job) -> str | None:
    """Return the time that a job still takes; a minimum while its input is read, None once it is over."""
    if not job.progress.HasField("remaining") or job.HasField("report"):
        return None
    minutes, seconds = divmod(round(ms_of(job.progress.remaining) / 1e3), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}{'' if job.progress.total_final else '+'}"


def _cost(job: pb.Job) -> str:
    """Return a cost as text: a dash where models have no prices."""
    progress = job.progress
    return "-" if not progress.cost and progress.completion_tokens else f"{progress.cost:.4g}"
