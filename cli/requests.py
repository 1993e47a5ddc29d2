"""`sluice requests`, `cancel` and `drain`: what runs, for who is on call."""

import time
from collections.abc import Sequence
from typing import Annotated, Final

from typer import Argument, BadParameter, Option

from cli import options, output
from sluice.client.blocking import Client
from sluice.v1 import admin_pb2

_POLL_S: Final = 0.5
ROWS_OF_WORKER: Final = ("sluice.worker.running", "sluice.worker.waiting")

OfTenant = Annotated[str, Option(help="Only requests of this tenant.", metavar="NAME")]


def requests(
    *,
    tenant: OfTenant = "",
    model: str = Option("", "--model", "-m", help="Only this model.", metavar="NAME"),
    limit: int = Option(100, help="Show at most N, oldest first.", min=1, max=1000, metavar="N"),
    client: options.OperatorClient,
) -> None:
    """List the running requests of all gateways, oldest first."""
    listed = client.requests(tenant=tenant, model=model, limit=limit)
    total, shown_count = sum(count.requests for count in listed.counts), len(listed.requests)

    objects = [_object(request) for request in listed.requests]

    def write() -> None:
        output.write_records(objects, keys=1)
        some = f", the oldest {shown_count} are shown" if shown_count < total else ""
        output.write_line(f"{total} requests run{some}")
        _warn_of_silent(listed.silent_gateways, "their requests are missing here")

    silent = list(listed.silent_gateways)
    described = {"requests": objects, "total": total, "silent_gateways": silent}
    output.show(described, write)


def cancel(
    *,
    request_ids: list[str] | None = Argument(
        None, help="Ids of running requests.", metavar="REQUEST_ID..."
    ),
    tenant: str = Option("", help="Cancel all requests of this tenant instead.", metavar="NAME"),
    client: options.OperatorClient,
) -> None:
    """Cancel running requests, or all of a tenant.

    Their callers get the error CANCELLED. Items of an offline job are tried again; `sluice batch cancel` ends the
    job itself.
    """
    if bool(request_ids) == bool(tenant):
        raise BadParameter("name requests, or a tenant with --tenant")
    done = client.cancel_requests(*(request_ids or ()), tenant=tenant)
    missing = sorted(set(request_ids or ()) - set(done.request_ids))
    described = {
        "cancelled": list(done.request_ids),
        "not_running": missing,
        "silent_gateways": list(done.silent_gateways),
    }

    def write() -> None:
        for name in done.request_ids:
            output.write_line(name)
        output.write_line(f"{len(done.request_ids)} requests cancelled")
        _warn_of_silent(done.silent_gateways, "their requests may go on")

    failed = ("REQUEST_UNKNOWN", f"{', '.join(missing)}: not running") if missing else None
    output.show(described, write, failed)


def drain(
    *,
    model: str = Argument(..., help="", metavar="MODEL"),
    worker: str = Argument(..., help="HOST:PORT/NAME, as `sluice top` shows it.", metavar="WORKER"),
    undo: bool = Option(False, "--undo", help="Return the worker to service."),
    wait: float = Option(0, help="Maximum wait for an empty worker.", metavar="SECONDS", min=0),
    client: options.OperatorClient,
) -> None:
    """Take a worker out of service, or put it back.

    A drained worker gets no new requests, and those in it run to their end. It stays drained when processes
    restart, until --undo.
    """
    changed = client.drain_worker(model, worker, undo=undo)
    rows = 0 if undo else _rows_left(client, model, worker, wait)
    text = f"{worker} of {model}: {'back in service' if undo else f'drained, {rows} rows run'}"
    if not undo and not changed.others:
        text += f"\nno other worker serves {model}: its requests wait or fail until --undo"
    described = {"drained": list(changed.drained), "others": changed.others, "rows": rows}
    left = ("ROWS_LEFT", f"{rows} rows still run after {wait:g} s") if wait and rows else None
    output.show(described, text, left)


def _rows_left(client: Client, model: str, worker: str, wait_s: float) -> int:
    """Return the rows in the worker now, or after at most `wait_s` seconds.

    The wait ends after two empty readings in a row: the first may miss what was on its way to the worker.
    """
    until, empty = time.monotonic() + wait_s, 0
    while True:
        rows = rows_in(client.metrics(*ROWS_OF_WORKER), model, worker)
        empty = 0 if rows else empty + 1
        if empty == 2 or time.monotonic() >= until:
            return rows
        time.sleep(_POLL_S)


def rows_in(response: admin_pb2.ReadMetricsResponse, model: str, worker: str) -> int:
    """Return the tasks that a worker computes or holds, as the batchers last heard from it."""
    counts = [
        sum(
            int(point.value)
            for series in process.metrics
            for point in series.points
            if list(point.labels) == [model, worker]
        )
        for process in response.processes
    ]
    return max(counts, default=0)


def _warn_of_silent(gateways: Sequence[str], what: str) -> None:
    if gateways:
        output.write_line(f"no answer from {', '.join(gateways)}: {what}")


def _object(request: admin_pb2.RunningRequest) -> dict[str, object]:
    described = output.message_object(request)
    priority, age_s, left_s = (described.pop(name) for name in ("priority", "age", "remaining"))
    times = {"age_s": round(age_s or 0.0, 3), "remaining_s": round(left_s or 0.0, 3)}
    return {**described, "class": priority, **times}
