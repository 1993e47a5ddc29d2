"""Jobs as people and programs see them: objects for --json, tables, and their progress."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from shutil import get_terminal_size
from typing import Any, Final

from cli import output
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import ms_of
from sluice.wire.enums import word_of

OVER: Final = (
    pb.JOB_STATE_COMPLETED,
    pb.JOB_STATE_FAILED,
    pb.JOB_STATE_CANCELLED,
    pb.JOB_STATE_EXPIRED,
)

_HEADERS: Final = ("job", "name", "state", "done", "failed", "items/s", "tokens/s", "left", "cost")
_LISTED: Final = ("job", "name", "state", "created", "finished", "done", "failed", "left", "cost")


def totals_of(totals: Mapping["pb.JobState.ValueType", int]) -> dict[str, int]:
    """Return the number of jobs in each state, by the name of the state."""
    return {word_of(pb.JobState, state): count for state, count in sorted(totals.items())}


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


_TIMES: Final = ("create_time", "start_time", "end_time")


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


def show(job: pb.Job) -> None:
    """Return a job as text."""
    write_table([job])
    for number, stage in enumerate(job.progress.stages):
        at_work = " *" * (number == job.progress.stage and job.state not in OVER)
        done = stage.succeeded + stage.dead
        output.write_line(
            f"stage {stage.name}: {done} of {stage.total}, {stage.dead} failed{at_work}"
        )
    progress = job.progress
    if progress.saved_tokens:
        output.write_line(
            f"{progress.deduplicated} items were identical to others: {progress.saved_tokens} tokens saved"
        )
    if progress.cached_prompt_tokens:
        share = progress.cached_prompt_tokens / progress.prompt_tokens
        output.write_line(f"{share:.0%} of the tokens of prompts were found in the prefix cache")
    if job.HasField("report"):
        for line in _shares(job.report):
            output.write_line(line)
    if job.nats_last_sequence:
        output.write_line(f"the last message read has the sequence {job.nats_last_sequence}")
    if job.reason:
        output.write_line(f"{job.reason_code}: {job.reason}")


def _shares(report: pb.JobReport) -> Iterator[str]:
    """Yield what a job that is over took of workers, as far as it is known."""
    if report.HasField("workers_busy_share"):
        yield f"its workers had items of it at work {report.workers_busy_share:.0%} of the time"
    if report.HasField("padding_share"):
        yield f"{report.padding_share:.0%} padding in the batches of its items"


def write_table(jobs: list[pb.Job]) -> None:
    """Write a table with one job a row."""
    output.write_table(_HEADERS, [_row(job) for job in jobs])


def write_list(jobs: list[pb.Job]) -> None:
    """Print jobs, one a row, with the times of their beginning and end."""
    rows = []
    for job in jobs:
        name, title, state, done, failed, _, _, left, cost = _row(job)
        times = _time(job, "create_time"), _time(job, "end_time")
        rows.append((name, title, state, *times, done, failed, left, cost))
    output.write_table(_LISTED, rows)


def _time(job: pb.Job, field: str) -> str | None:
    """Return a time of a job as a person here reads it; None before it."""
    if not job.HasField(field):  # type: ignore[arg-type]
        return None
    at = datetime.fromtimestamp(ms_of(getattr(job, field)) / 1e3)
    return f"{at:%H:%M:%S}" if at.date() == datetime.now().date() else f"{at:%Y-%m-%d %H:%M}"


def sentence(job: pb.Job) -> str:
    """Say how far a job is, in one line."""
    _, _, state, done, failed, items, tokens, _, cost = _row(job)
    least = "" if job.progress.total_final else "at least "
    left = f" · {least}{_span(job)} left" if job.progress.HasField("remaining") else ""
    return f"{state} · {done} done · {failed} failed · {items} items/s · {tokens} tokens/s{left} · cost {cost}"


def fitting(text: str, width: int) -> str:
    """Leave out rates, then what is at the end, until a sentence fits a terminal."""
    parts = text.split(" · ")
    while len(parts) > 1 and len(" · ".join(parts)) > width:
        rate = next((part for part in parts if part.endswith("/s")), parts[-1])
        parts.remove(rate)
    return " · ".join(parts)[:width]


@contextmanager
def display(shown: bool) -> Iterator[Callable[[pb.Job], None]]:
    """Show the progress of a job on stderr: one line on a terminal, else a line for each state and tenth."""
    live, last = output.can_move(sys.stderr), (0, 0)

    def update(job: pb.Job) -> None:
        nonlocal last
        progress = job.progress
        now = (job.state, 10 * (progress.succeeded + progress.dead) // max(1, progress.total))
        if shown and (live or now != last):
            last = now
            text = f"{job.id}: {sentence(job)}"
            if live:
                text = f"\r\x1b[K{fitting(text, get_terminal_size().columns - 1)}"
            print(text, end="" if live else "\n", file=sys.stderr, flush=True)

    try:
        yield update
    finally:
        if shown and live:
            print(file=sys.stderr)


def _row(job: pb.Job) -> tuple[object, ...]:
    progress, speed, more = job.progress, _speed(job), "" if job.progress.total_final else "+"
    return (
        job.id,
        job.spec.name or None,
        state_of(job),
        f"{progress.succeeded + progress.dead}/{progress.total}{more}",
        progress.dead,
        f"{speed.items_per_second:.1f}",
        f"{speed.tokens_per_second:.0f}",
        f"{_span(job)}{more}" if progress.HasField("remaining") and job.state not in OVER else None,
        _cost(progress),
    )


def _speed(job: pb.Job) -> pb.JobProgress | pb.JobReport:
    """Return the speed over the last minute, or over the whole run of a job that has ended."""
    return job.report if job.HasField("report") else job.progress


def _cost(progress: pb.JobProgress) -> str:
    """Return a cost as text: a dash where models have no prices."""
    return "-" if not progress.cost and progress.completion_tokens else f"{progress.cost:.4g}"


def _span(job: pb.Job) -> str:
    minutes, seconds = divmod(round(ms_of(job.progress.remaining) / 1e3), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
