"""`sluice batch`: offline jobs over many prompts."""

import json
import os
import sys
import uuid
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from typer import Argument, BadParameter, Option

from cli import batch_view, options, output
from cli.commands import Commands, wants_json
from cli.failure import CommandFailed
from cli.files import NewFile, check_input, pieces
from sluice.client import Client
from sluice.client.openai_lines import output_line
from sluice.client.request import generate_request
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import duration, timestamp, unix_ms
from sluice.wire.enums import value_of, word_of

_REMOTE: Final = "://"
_NATS: Final = "nats://"


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """How the input is written, and where the messages of a subject begin and end."""

    format: Literal["auto", "openai", "jsonl", "csv", "parquet"] = Option(
        "auto", help="Input format."
    )
    template: str = Option("", help='Prompt from columns: "Summarize: {text}".', metavar="TEXT")
    id_field: str = Option("", help='Column of item names.  [default: "id"]', metavar="NAME")
    messages: int = Option(0, help="nats:// inputs: stop after this many messages.", min=0)
    idle: float = Option(0.0, help="nats:// inputs: stop when none came.", min=0, metavar="SECONDS")
    from_sequence: int = Option(0, help="nats:// inputs: sequence of the first message.", min=0)

    def fill(self, where: pb.JobInput, source: str) -> Path | None:
        """Describe the input in `where`; return the path of the file to upload, if it is one."""
        word = "unspecified" if self.format == "auto" else self.format
        where.format = value_of(pb.JobInputFormat, word)
        where.template, where.id_field = self.template, self.id_field
        if source.startswith(_NATS):
            where.nats_subject = source.removeprefix(_NATS)
        elif self.messages or self.idle or self.from_sequence:
            message = "--messages, --idle and --from-sequence are for nats://SUBJECT"
            raise BadParameter(message, param_hint="IN")
        elif _REMOTE in source:
            where.url = source
        else:
            return Path(source)
        where.nats_message_count, where.nats_start_sequence = self.messages, self.from_sequence
        if self.idle:
            where.nats_idle.CopyFrom(duration(self.idle * 1e3))
        return None


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """How long documents are split, and the answers to their parts put together."""

    split: int = Option(0, help="Tokens of a part of a long document.", min=0, metavar="TOKENS")
    overlap: int = Option(
        0, help="Tokens that parts share; needs --split.", min=0, metavar="TOKENS"
    )
    map: str = Option("", help='The prompt of a part: "Summarize: {text}".', metavar="TEXT")
    reduce: str = Option("", help='Split; prompt of the merge: "Join: {text}".', metavar="TEXT")

    def stages(self) -> list[pb.JobStage]:
        """Return the stages of a job that splits documents, else an empty list."""
        if not self.reduce:
            if self.split or self.overlap or self.map:
                message = "required with --split, --overlap and --map; give the prompt that merges the answers"
                raise BadParameter(message, param_hint="--reduce")
            return []
        first = pb.JobStage(
            name="map",
            template=self.map,
            split_tokens=self.split,
            overlap_tokens=self.overlap,
        )
        return [first, pb.JobStage(name="reduce", template=self.reduce)]


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """When a job ends, is paused or gives an item up, and how fast it runs."""

    deadline: float | None = Option(None, help="Deadline of the job, from now.", metavar="SECONDS")
    max_cost: float = Option(0.0, help="Pause the job at this cost.", min=0)
    requests_per_minute: int = Option(0, help="Maximum number of requests per minute.", min=0)
    tokens_per_minute: int = Option(0, help="Maximum number of tokens per minute.", min=0)
    concurrency: int = Option(0, help="Maximum number of items in flight.", min=0)
    max_bad_lines: float | None = Option(
        None, help="Share of bad lines that pauses the job.", min=0, max=1
    )
    max_retries: int | None = Option(None, help="Retries of an item.  [default: 3]", min=0)

    def limits(self, item_timeout_s: float | None) -> pb.JobLimits:
        """Return the limits that were given; the others keep their defaults."""
        end_ms = None if self.deadline is None else unix_ms() + round(self.deadline * 1e3)
        return pb.JobLimits(
            item_timeout=None if item_timeout_s is None else duration(item_timeout_s * 1e3),
            deadline_time=None if end_ms is None else timestamp(end_ms),
            max_cost=self.max_cost,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            concurrency=self.concurrency,
            max_bad_line_share=self.max_bad_lines,
        )

    def retries(self) -> pb.JobRetries | None:
        """Return the retries that were given; None selects the default of the mesh."""
        return None if self.max_retries is None else pb.JobRetries(max_retries=self.max_retries)


batch = Commands(
    "Run offline jobs: many prompts from a file. "
    "Each is answered once. Jobs use the capacity that interactive traffic leaves free."
)

Out = Annotated[Path | None, Option(help="Write OpenAI's batch output here.", metavar="FILE")]
JobId = Annotated[str, Argument(metavar="JOB")]
MaxDead = Annotated[int, Option(help="Exit with 1 above this many dead letters.", min=0)]
_SECRET_VARIABLE: Final = "SLUICE_WEBHOOK_SECRET"


@batch.command()
def submit(
    *,
    source: str = Argument(
        ..., help="File, or URL: s3://bucket/file, nats://SUBJECT.", metavar="IN"
    ),
    chosen: options.BulkSampling,
    out: Out = None,
    wait: bool = Option(False, "--wait", help="Wait until the job is over."),
    watch: bool = Option(False, "--watch", help="Show the progress until the job is over."),
    input_options: InputOptions,
    stages: StageOptions,
    reuse: list[str] | None = Option(None, help="Reuse this job's answers.", metavar="JOB"),
    name: str = Option("", help="Name of the job, shown in lists."),
    key: str = Option("", help="Idempotency key: the same key and specification are the same job."),
    bounds: LimitOptions,
    webhook: str = Option(
        "", help=f"URL told of the end; signed by ${_SECRET_VARIABLE}.", metavar="URL"
    ),
    max_dead: MaxDead = 0,
    client: options.TenantClient,
) -> None:
    """Create a job and print its id; with --out, --wait or --watch, wait until it is over.

    --out implies --wait. Interrupting the command does not stop the job. Exit code 0 when the job was created, or when
    it was waited for, completed, and has no more dead letters than --max-dead.
    """
    request = generate_request("-", chosen)
    spec = pb.JobSpec(
        name=name,
        model=request.model,
        sampling=request.sampling,
        labels=dict(request.labels),
        stages=stages.stages(),
        limits=bounds.limits(chosen.get("timeout_s")),
        retries=bounds.retries(),
    )
    spec.dedupe.reuse_job_ids.extend(reuse or ())
    if webhook:
        spec.webhook.url, spec.webhook.secret = webhook, os.environ.get(_SECRET_VARIABLE, "")
    local = input_options.fill(spec.input, source)
    if local is not None:
        check_input(local)
    waits = out is not None or wait
    with NewFile(out) if out else nullcontext() as file:
        if local is not None:
            if waits:
                output.progress(f"uploading {local.name}")
            spec.input.upload_id = client.jobs.upload(local.name, lambda: pieces(local))
        job = client.jobs.create(spec, key or uuid.uuid4().hex)
        if file is None and not wait and not watch:
            _show(job)
            return
        if not watch:
            output.progress(
                f"created job {job.id}, waiting for its end (--watch shows how far it is)"
            )
        _finish(client, job, file, watch, max_dead)


@batch.command()
def status(job: JobId, client: options.TenantClient) -> None:
    """Show a job: state, progress, and what to do when it needs a person."""
    _show(client.jobs.get(job))


@batch.command()
def watch(
    *,
    job: JobId,
    out: Out = None,
    max_dead: MaxDead = 0,
    client: options.TenantClient,
) -> None:
    """Show the progress of a job until it is over or paused; as `submit --watch` does."""
    with NewFile(out) if out else nullcontext() as file:
        _finish(client, client.jobs.get(job), file, True, max_dead)


@batch.command("list")
def list_jobs(
    *,
    state: list[str] | None = Option(None, help="Only this state; repeatable.", metavar="STATE"),
    client: options.TenantClient,
) -> None:
    """List the jobs, newest first, and how many there are in each state."""
    states = [_state_of(word) for word in state or ()]
    jobs = list(client.jobs.list(states))
    counts = sorted(client.jobs.totals().items())
    totals = {word_of(pb.JobState, state): count for state, count in counts}
    described = {"jobs": [batch_view.job_object(job) for job in jobs], "totals": totals}

    def show() -> None:
        batch_view.write_list(jobs)
        if totals:
            print(", ".join(f"{count} {word}" for word, count in totals.items()))

    output.show(described, show)


@batch.command()
def results(
    *,
    job: JobId,
    out: Out = None,
    from_index: int = Option(0, help="Index of the first item, from 0.", min=0),
    stage: int | None = Option(None, help="Stage, from 1.  [default: the last]", min=1),
    follow: bool = Option(False, "--follow", help="Wait for results that are still to come."),
    client: options.TenantClient,
) -> None:
    """Print the results as OpenAI's batch output, a line each, in the order of the input, dead letters among them.

    With --out and --json prints how many lines were written.
    """
    with NewFile(out) if out else nullcontext() as file:
        number = None if stage is None else stage - 1
        results = client.jobs.results(job, from_index=from_index, follow=follow, stage=number)
        if file is None:
            for result in results:
                output.write_json(output_line(job, result))
            return
        lines = _fill(file, job, results)
    output.show({"id": job, "out": str(out), "lines": lines}, f"wrote {lines} lines to {out}")


@batch.command("dead-letters")
def dead_letters(job: JobId, client: options.TenantClient) -> None:
    """List the items that failed for good, and the lines that are no items; with --json an object a line."""
    letters = client.jobs.dead_letters(job)
    if wants_json():
        for letter in letters:
            output.write_json(batch_view.letter_object(letter))
        return
    rows = [
        (one.line, one.custom_id or None, one.attempts, one.error.reason, one.error.message)
        for one in letters
    ]
    output.write_table(("line", "custom_id", "tries", "reason", "message"), rows)


@batch.command()
def retry(
    *,
    job: JobId,
    reason: list[str] | None = Option(None, help="Only this reason; repeatable.", metavar="REASON"),
    client: options.TenantClient,
) -> None:
    """Run the dead letters of a job that is over again."""
    count = client.jobs.retry(job, reason or ())
    output.show({"id": job, "items": count}, f"{count} items of {job} run again")


@batch.command()
def pause(job: JobId, client: options.TenantClient) -> None:
    """Stop a job until it is resumed; what is computed is kept."""
    _show(client.jobs.pause(job))


@batch.command()
def resume(
    *,
    job: JobId,
    max_cost: float | None = Option(None, help="New maximum cost; 0: none.", min=0),
    max_bad_lines: float | None = Option(
        None, help="Share of bad lines that pauses the job.", min=0, max=1
    ),
    client: options.TenantClient,
) -> None:
    """Continue a paused job where it stopped."""
    limits = None
    if max_cost is not None or max_bad_lines is not None:
        limits = client.jobs.get(job).spec.limits
        if max_cost is not None:
            limits.max_cost = max_cost
        if max_bad_lines is not None:
            limits.max_bad_line_share = max_bad_lines
    _show(client.jobs.resume(job, limits))


@batch.command()
def cancel(job: JobId, client: options.TenantClient) -> None:
    """End a job for good; its results so far stay readable."""
    _show(client.jobs.cancel(job))


@batch.command()
def delete(job: JobId, client: options.TenantClient) -> None:
    """Delete a job that is over, with its results."""
    client.jobs.delete(job)
    output.show({"id": job, "deleted": True})


def _state_of(word: str) -> pb.JobState.ValueType:
    try:
        return value_of(pb.JobState, word)
    except ValueError as error:
        states = ", ".join(word_of(pb.JobState, state) for state in pb.JobState.values()[1:])
        raise BadParameter(
            f"unknown state {word!r}; use one of {states}", param_hint="--state"
        ) from error


def _finish(
    client: Client, job: pb.Job, file: NewFile | None, is_watched: bool, max_dead: int
) -> None:
    """Wait until `job` is over, write its results and print it."""
    if file is not None:
        file.hint = f"the results are kept: sluice batch results {job.id} --out FILE"
    try:
        job = _wait(client, job, is_watched)
    except KeyboardInterrupt:
        hint = f"the job continues; follow it with: sluice batch watch {job.id}"
        print(hint, file=sys.stderr, flush=True)
        raise
    described, state = batch_view.job_object(job), batch_view.state_of(job)
    if job.state == pb.JOB_STATE_PAUSED:
        message = f"{job.id} is paused: {job.reason}; then: sluice batch resume {job.id}"
        raise CommandFailed(job.reason_code or "PAUSED", message, described)
    if file is not None:
        lines = _fill(file, job.id, client.jobs.results(job.id))
        described |= {"out": str(file.path), "lines": lines}
    if job.state != pb.JOB_STATE_COMPLETED:
        message = f"{job.id} is {state}: {job.reason}"
        raise CommandFailed(job.reason_code or state.upper(), message, described)
    if job.progress.dead > max_dead:
        message = f"{job.progress.dead} of {job.progress.total} items failed: sluice batch dead-letters {job.id}"
        raise CommandFailed("DEAD_LETTERS", message, described)
    output.show(described)


def _wait(client: Client, job: pb.Job, is_watched: bool) -> pb.Job:
    with batch_view.display(is_watched) as show:
        for changed in client.jobs.watch(job.id, until_paused=True):
            if not is_watched and changed.reason and changed.reason != job.reason:
                output.progress(f"job {job.id}: {changed.reason}")
            job = changed
            show(job)
    return job


def _fill(file: NewFile, job_id: str, job_results: Iterable[pb.JobResult]) -> int:
    """Write results, complete the file, and return how many there were."""
    lines = 0
    for result in job_results:
        file.write(json.dumps(output_line(job_id, result), ensure_ascii=False) + "\n")
        lines += 1
    file.complete()
    return lines


def _show(job: pb.Job) -> None:
    output.show(batch_view.job_object(job))
