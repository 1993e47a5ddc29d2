"""`sluice batch`: offline jobs over many prompts, and a list of prompts answered together."""

import os
import sys
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from sluice.cli import batch_view, options, output
from sluice.cli.batch_files import OutFile, check_input, opened, pieces
from sluice.cli.batch_options import (
    FromSequence,
    IdField,
    Idle,
    InputTemplate,
    MapTemplate,
    Messages,
    Out,
    Overlap,
    ReduceTemplate,
    Reuse,
    Split,
)
from sluice.cli.batch_run import run
from sluice.cli.failure import CommandFailed
from sluice.client import Client, GenerateOptions
from sluice.client.openai_lines import output_line
from sluice.client.request import generate_request
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import duration, timestamp, unix_ms
from sluice.wire.enums import value_of

batch = typer.Typer(
    name="batch",
    add_completion=False,
    no_args_is_help=True,
    help="Run offline jobs: many prompts from a file, each answered once, on what interactive traffic leaves free.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

batch.command()(options.bulk_sampling(run))

FormatName = Literal["auto", "openai", "jsonl", "csv", "parquet"]
JobId = Annotated[str, typer.Argument(metavar="JOB", show_default=False)]
MaxDead = Annotated[
    int,
    typer.Option(min=0, help="With more dead letters than this a completed job is a failure."),
]
_SECRET_VARIABLE: Final = "SLUICE_WEBHOOK_SECRET"
_REMOTE: Final = "://"
_NATS: Final = "nats://"


@batch.command()
@options.bulk_sampling
def submit(
    *,
    source: Annotated[
        str,
        typer.Argument(
            metavar="IN",
            show_default=False,
            help="A file, which is uploaded, or a URL that the mesh opens itself: s3://bucket/file, nats://SUBJECT.",
        ),
    ],
    chosen: GenerateOptions,
    out: Out = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the job is over.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Wait, and show the progress.")] = False,
    format: Annotated[FormatName, typer.Option(help="How the input is written.")] = "auto",
    template: InputTemplate = None,
    id_field: IdField = "",
    messages: Messages = 0,
    idle: Idle = 0.0,
    from_sequence: FromSequence = 0,
    split: Split = 0,
    overlap: Overlap = 0,
    map_template: MapTemplate = "",
    reduce_template: ReduceTemplate = "",
    reuse: Reuse = None,
    name: Annotated[str, typer.Option(help="For people.")] = "",
    key: Annotated[str, typer.Option(help="The same key and specification are the same job.")] = "",
    deadline: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="The job expires after this time.")
    ] = None,
    max_cost: Annotated[float, typer.Option(min=0, help="The job is paused at this cost.")] = 0.0,
    requests_per_minute: Annotated[int, typer.Option(min=0)] = 0,
    tokens_per_minute: Annotated[int, typer.Option(min=0)] = 0,
    concurrency: Annotated[int, typer.Option(min=0, help="Items in flight at once.")] = 0,
    max_bad_lines: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="The job is paused above this share of bad lines.  [default: 0.1]"
        ),
    ] = None,
    max_retries: Annotated[
        int | None, typer.Option(min=0, help="Of an item.  [default: 3]")
    ] = None,
    webhook: Annotated[
        str,
        typer.Option(metavar="URL", help=f"Told about the end; ${_SECRET_VARIABLE} signs it."),
    ] = "",
    max_dead: MaxDead = 0,
    tenant: options.Tenant = None,
    address: options.Address = options.ADDRESS,
    as_json: options.Json = False,
) -> None:
    """Create a job and print its id; with --out, --wait or --watch, wait until it is over.

    --out implies --wait. Interrupting the command does not stop the job. Exit code 0 when the job was created, or when
    it was waited for, completed, and has no more dead letters than --max-dead.
    """
    asked = generate_request("-", chosen)
    spec = pb.JobSpec(
        name=name, model=asked.model, sampling=asked.sampling, labels=dict(asked.labels)
    )
    spec.input.format = value_of(pb.JobInputFormat, "unspecified" if format == "auto" else format)
    spec.input.template, spec.input.id_field = template or "", id_field
    spec.stages.extend(_stages(split, overlap, map_template, reduce_template))
    spec.dedupe.reuse_job_ids.extend(reuse or ())
    limits = spec.limits
    if "timeout_s" in chosen:
        limits.item_timeout.CopyFrom(duration(chosen["timeout_s"] * 1e3))
    if deadline is not None:
        limits.deadline_time.CopyFrom(timestamp(unix_ms() + round(deadline * 1e3)))
    limits.max_cost, limits.concurrency = max_cost, concurrency
    limits.requests_per_minute, limits.tokens_per_minute = requests_per_minute, tokens_per_minute
    if max_bad_lines is not None:
        limits.max_bad_line_share = max_bad_lines
    if max_retries is not None:
        spec.retries.max_retries = max_retries
    if webhook:
        spec.webhook.url, spec.webhook.secret = webhook, os.environ.get(_SECRET_VARIABLE, "")
    local = _set_source(spec.input, source)
    _set_end(spec.input, messages, idle, from_sequence)
    if local is not None:
        check_input(local)
    with Client(address, tenant=tenant) as client, opened(out) as file:
        if local is not None:
            spec.input.upload_id = client.jobs.upload(local.name, lambda: pieces(local))
        job = client.jobs.create(spec, key or uuid.uuid4().hex)
        if file is None and not wait and not watch:
            _print(job, as_json)
            return
        _finish(client, job, file, watch, max_dead, as_json)


@batch.command()
def status(
    job: JobId,
    tenant: options.Tenant = None,
    address: options.Address = options.ADDRESS,
    as_json: options.Json = False,
) -> None:
    """Show a job: state, progress, and what to do when it needs a person."""
    with Client(address, tenant=tenant) as client:
        _print(client.jobs.get(job), as_json)


@batch.command()
def watch(
    job: JobId,
    out: Out = None,
    max_dead: MaxDead = 0,
    tenant: options.Tenant = None,
    address: options.Address = options.ADDRESS,
    as_json: options.Json = False,
) -> None:
    """Show the progress of a job until it is over or paused; as `submit --watch` does."""
    with Client(address, tenant=tenant) as client, opened(out) as file:
        _finish(client, client.jobs.get(job), file, True, max_dead, as_json)


@batch.command("list")
def list_jobs(
    state: Annotated[
        list[str] | None,
        typer.Option(metavar="STATE", help="Only jobs in this state; may be repeated."),
    ] = None,
    tenant: options.Tenant = None,
    address: options.Address = options.ADDRESS,
    as_json: options.Json = False,
) -> None:
    """List the jobs, newest first."""
    states = [_state_of(word) for word in state or ()]
    with Client(address, tenant=tenant) as client:
        jobs = list(client.jobs.list(states))
    if as_json:
        output.write_json({"jobs": [batch_view.job_object(job) for job in jobs]})
    else:
        batch_view.write_table(jobs)


@batch.command()
def results(
    job: JobId,
    out: Out = None,
    from_index: Annotated[int, typer.Option(min=0, help="The first item, from 0.")] = 0,
    stage: Annotated[
        int | None,
        typer.Option(min=1, help="Of a job with stages: of this one.  [default: the last]"),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for those that are still to come.")
    ] = False,
    tenant: options.Tenant = None,
    address: options.Address = options.ADDRESS,
    as_json: options.Json = False,
) -> None:
    """Print the results as OpenAI's batch output, a line each, in the order of the input, dead letters among them.

    With --out and --json prints how many lines were written.
    """
    with Client(address, tenant=tenant) as client, opened(out) as file:
        number = None if stage is None else stage - 1
        found = client.jobs.results(job, from_index=from_index, follow=follow, stage=number)
        if file is None:
            for result in found:
                output.write_json(output_line(job, result))
            return
        _fill(file, job, found)
    if as_json:
        output.write_json({"id": job, "out": str(out), "lines": file.lines})
    else:
        print(f"{out}: {file.lines} lines")


@batch.command("dead-letters")
def dead_letters(
    job: JobId,
    tenant: options.Tenant = None,
    address: options.Address = options.ADDRESS,
    as_json: options.Json = False,
) -> None:
    """List the items that failed for good, and the lines that are no items; with --json an object a line."""
    with Client(address, tenant=tenant) as client:
        letters = client.jobs.dead_letters(job)
        if as_json:
            for letter in letters:
                output.write_json(batch_view.letter_object(letter))
            return
        rows = [
            (
                str(one.line),
                one.custom_id or "-",
                str(one.attempts),
                one.error.reason,
                one.error.message,
            )
            for one in letters
        ]
    output.write_table(("line", "custom_id", "tries", "reason", "message"), rows)


@batch.command()
def retry(
    job: JobId,
    reason: Annotated[
        list[str] | None,
        typer.Option(metavar="REASON", help="Only these; may be repeated."),
    ] = None,
    tenant: options.Tenant = None,
    address: options.Address = options.ADDRESS,
    as_json: options.Json = False,
) -> None:
    """Run the dead letters of a job that is over again."""
    with Client(address, tenant=tenant) as client:
        count = client.jobs.retry(job, reason or ())
    if as_json:
        output.write_json({"id": job, "items": count})
    else:
        print(f"{count} items of {job} run again")


@batch.command()
def pause(
    job: JobId,
    tenant: options.Tenant = None,
    address: options.Address = options.ADDRESS,
    as_json: options.Json = False,
) -> None:
    """Stop a job until it is resumed; what is computed is kept."""
    with Client(address, tenant=tenant) as client:
        _print(client.jobs.pause(job), as_json)


@batch.command()
def resume(
    job: JobId,
    max_cost: Annotated[
        float | None, typer.Option(min=0, help="The new bound of its cost; 0: none.")
    ] = None,
    max_bad_lines: Annotated[
        float | None, typer.Option(min=0, max=1, help="The new share of bad lines.")
    ] = None,
    tenant: options.Tenant = None,
    address: options.Address = options.ADDRESS,
    as_json: options.Json = False,
) -> None:
    """Continue a paused job where it stopped."""
    with Client(address, tenant=tenant) as client:
        limits = None
        if max_cost is not None or max_bad_lines is not None:
            limits = client.jobs.get(job).spec.limits
            if max_cost is not None:
                limits.max_cost = max_cost
            if max_bad_lines is not None:
                limits.max_bad_line_share = max_bad_lines
        _print(client.jobs.resume(job, limits), as_json)


@batch.command()
def cancel(
    job: JobId,
    tenant: options.Tenant = None,
    address: options.Address = options.ADDRESS,
    as_json: options.Json = False,
) -> None:
    """End a job for good; its results so far stay readable."""
    with Client(address, tenant=tenant) as client:
        _print(client.jobs.cancel(job), as_json)


@batch.command()
def delete(
    job: JobId,
    tenant: options.Tenant = None,
    address: options.Address = options.ADDRESS,
    as_json: options.Json = False,
) -> None:
    """Delete a job that is over, with its results."""
    with Client(address, tenant=tenant) as client:
        client.jobs.delete(job)
    if as_json:
        output.write_json({"id": job, "deleted": True})


def _set_source(where: pb.JobInput, source: str) -> Path | None:
    """Says where the input is; the path of a file that is to be uploaded."""
    if source.startswith(_NATS):
        where.nats_subject = source.removeprefix(_NATS)
    elif _REMOTE in source:
        where.url = source
    else:
        return Path(source)
    return None


def _set_end(where: pb.JobInput, messages: int, idle_s: float, first: int) -> None:
    """Says where the messages of a subject begin and end."""
    if not where.nats_subject and (messages or idle_s or first):
        message = "--messages, --idle and --from-sequence are for nats://SUBJECT"
        raise typer.BadParameter(message, param_hint="IN")
    where.nats_message_count, where.nats_start_sequence = messages, first
    if idle_s:
        where.nats_idle.CopyFrom(duration(idle_s * 1e3))


def _stages(split: int, overlap: int, map_: str, reduce: str) -> list[pb.JobStage]:
    """Of a job that splits documents; else none."""
    if not reduce:
        if split or overlap or map_:
            message = "says how the answers to the parts are put together: it is needed"
            raise typer.BadParameter(message, param_hint="--reduce")
        return []
    first = pb.JobStage(name="map", template=map_, split_tokens=split, overlap_tokens=overlap)
    return [first, pb.JobStage(name="reduce", template=reduce)]


def _state_of(word: str) -> pb.JobState.ValueType:
    try:
        return value_of(pb.JobState, word)
    except ValueError as error:
        known = ", ".join(
            name.removeprefix("JOB_STATE_").lower() for name in pb.JobState.keys()[1:]
        )
        raise typer.BadParameter(f"{word!r} is none of {known}", param_hint="--state") from error


def _finish(
    client: Client, job: pb.Job, file: OutFile | None, shown: bool, max_dead: int, as_json: bool
) -> None:
    """Waits until ``job`` is over, writes its results, prints it; raises unless it has done what was asked."""
    if file is not None:
        file.hint = f"the results are kept: sluice batch results {job.id} --out FILE"
    try:
        job = _wait(client, job, shown)
    except KeyboardInterrupt:
        print(f"the job goes on: sluice batch watch {job.id}", file=sys.stderr, flush=True)
        raise
    described = batch_view.job_object(job)
    if job.state == pb.JOB_STATE_PAUSED:
        hint = f"; then: sluice batch resume {job.id}"
        raise CommandFailed(
            job.reason_code or "PAUSED", f"{job.id} is paused: {job.reason}{hint}", described
        )
    if file is not None:
        _fill(file, job.id, client.jobs.results(job.id))
    if job.state != pb.JOB_STATE_COMPLETED:
        state = batch_view.state_of(job)
        reason = job.reason_code or state.upper()
        raise CommandFailed(reason, f"{job.id} is {state}: {job.reason}", described)
    if job.progress.dead > max_dead:
        message = f"{job.progress.dead} of {job.progress.total} items failed: sluice batch dead-letters {job.id}"
        raise CommandFailed("DEAD_LETTERS", message, described)
    _print(job, as_json)


def _wait(client: Client, job: pb.Job, shown: bool) -> pb.Job:
    with batch_view.display(shown) as display:
        for changed in client.jobs.watch(job.id, until_paused=True):
            job = changed
            display.update(job)
    return job


def _fill(file: OutFile, job_id: str, found: Iterable[pb.JobResult]) -> None:
    for result in found:
        file.write(output_line(job_id, result))
    file.complete()


def _print(job: pb.Job, as_json: bool) -> None:
    if as_json:
        output.write_json(batch_view.job_object(job))
    else:
        batch_view.show(job)
