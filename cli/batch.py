"""`sluice batch`: offline jobs over many prompts, and a list of prompts answered together."""

import os
import sys
import uuid
from collections.abc import Iterable
from typing import Annotated, Final

import typer

from cli import batch_view, options, output
from cli.batch_options import InputOptions, LimitOptions, Out, StageOptions
from cli.batch_run import run
from cli.commands import Commands, wants_json
from cli.failure import CommandFailed
from cli.files import OutFile, check_input, opened, pieces
from sluice.client import Client
from sluice.client.openai_lines import output_line
from sluice.client.request import generate_request
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.enums import value_of, word_of

batch = Commands(
    "Run offline jobs: many prompts from a file, each answered once, on what interactive traffic leaves free."
)
batch.command()(run)

JobId = Annotated[str, typer.Argument(metavar="JOB", show_default=False)]
MaxDead = Annotated[
    int,
    typer.Option(min=0, help="With more dead letters than this a completed job is a failure."),
]
_SECRET_VARIABLE: Final = "SLUICE_WEBHOOK_SECRET"


@batch.command()
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
    chosen: options.BulkSampling,
    out: Out = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the job is over.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Wait, and show the progress.")] = False,
    given: InputOptions,
    stages: StageOptions,
    reuse: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JOB", help="Take this job's answers to identical prompts; may be repeated."
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="For people.")] = "",
    key: Annotated[str, typer.Option(help="The same key and specification are the same job.")] = "",
    bounds: LimitOptions,
    webhook: Annotated[
        str,
        typer.Option(metavar="URL", help=f"Told about the end; ${_SECRET_VARIABLE} signs it."),
    ] = "",
    max_dead: MaxDead = 0,
    client: options.TenantClient,
) -> None:
    """Create a job and print its id; with --out, --wait or --watch, wait until it is over.

    --out implies --wait. Interrupting the command does not stop the job. Exit code 0 when the job was created, or when
    it was waited for, completed, and has no more dead letters than --max-dead.
    """
    asked = generate_request("-", chosen)
    spec = pb.JobSpec(
        name=name,
        model=asked.model,
        sampling=asked.sampling,
        labels=dict(asked.labels),
        stages=stages.stages(),
        limits=bounds.limits(chosen.get("timeout_s")),
        retries=bounds.retries(),
    )
    spec.dedupe.reuse_job_ids.extend(reuse or ())
    if webhook:
        spec.webhook.url, spec.webhook.secret = webhook, os.environ.get(_SECRET_VARIABLE, "")
    local = given.fill(spec.input, source)
    if local is not None:
        check_input(local)
    with opened(out) as file:
        if local is not None:
            spec.input.upload_id = client.jobs.upload(local.name, lambda: pieces(local))
        job = client.jobs.create(spec, key or uuid.uuid4().hex)
        if file is None and not wait and not watch:
            _show(job)
            return
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
    with opened(out) as file:
        _finish(client, client.jobs.get(job), file, True, max_dead)


@batch.command("list")
def list_jobs(
    *,
    state: Annotated[
        list[str] | None,
        typer.Option(metavar="STATE", help="Only jobs in this state; may be repeated."),
    ] = None,
    client: options.TenantClient,
) -> None:
    """List the jobs, newest first."""
    states = [_state_of(word) for word in state or ()]
    jobs = list(client.jobs.list(states))
    described = {"jobs": [batch_view.job_object(job) for job in jobs]}
    output.show(described, lambda: batch_view.write_table(jobs))


@batch.command()
def results(
    *,
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
    client: options.TenantClient,
) -> None:
    """Print the results as OpenAI's batch output, a line each, in the order of the input, dead letters among them.

    With --out and --json prints how many lines were written.
    """
    with opened(out) as file:
        number = None if stage is None else stage - 1
        found = client.jobs.results(job, from_index=from_index, follow=follow, stage=number)
        if file is None:
            for result in found:
                output.write_json(output_line(job, result))
            return
        _fill(file, job, found)
    described = {"id": job, "out": str(out), "lines": file.lines}
    output.show(described, f"{out}: {file.lines} lines")


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
    reason: Annotated[
        list[str] | None,
        typer.Option(metavar="REASON", help="Only these; may be repeated."),
    ] = None,
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
    max_cost: Annotated[
        float | None, typer.Option(min=0, help="The new bound of its cost; 0: none.")
    ] = None,
    max_bad_lines: Annotated[
        float | None, typer.Option(min=0, max=1, help="The new share of bad lines.")
    ] = None,
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
        known = ", ".join(word_of(pb.JobState, state) for state in pb.JobState.values()[1:])
        raise typer.BadParameter(f"{word!r} is none of {known}", param_hint="--state") from error


def _finish(client: Client, job: pb.Job, file: OutFile | None, shown: bool, max_dead: int) -> None:
    """Waits until ``job`` is over, writes its results, prints it; raises unless it has done what was asked."""
    if file is not None:
        file.hint = f"the results are kept: sluice batch results {job.id} --out FILE"
    try:
        job = _wait(client, job, shown)
    except KeyboardInterrupt:
        print(f"the job goes on: sluice batch watch {job.id}", file=sys.stderr, flush=True)
        raise
    described, state = batch_view.job_object(job), batch_view.state_of(job)
    if job.state == pb.JOB_STATE_PAUSED:
        message = f"{job.id} is paused: {job.reason}; then: sluice batch resume {job.id}"
        raise CommandFailed(job.reason_code or "PAUSED", message, described)
    if file is not None:
        _fill(file, job.id, client.jobs.results(job.id))
    if job.state != pb.JOB_STATE_COMPLETED:
        message = f"{job.id} is {state}: {job.reason}"
        raise CommandFailed(job.reason_code or state.upper(), message, described)
    if job.progress.dead > max_dead:
        message = f"{job.progress.dead} of {job.progress.total} items failed: sluice batch dead-letters {job.id}"
        raise CommandFailed("DEAD_LETTERS", message, described)
    _show(job)


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


def _show(job: pb.Job) -> None:
    output.show(batch_view.job_object(job), lambda: batch_view.show(job))
