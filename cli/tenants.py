"""`sluice tenants` and `sluice cache`: what tenants use of their limits, and the end of what is kept of them."""

import os
import sys
from contextlib import suppress
from typing import Literal

from typer import Argument, Option

from cli import options, output
from cli.commands import Commands
from sluice.client import Client
from sluice.client.channel import API_KEY_VARIABLE
from sluice.errors import JobsDisabled, WrongJobState

tenants = Commands("Show what tenants use of their limits, or forget one.")


@tenants.command("list")
def list_(
    *,
    tenant: str = Option("", help="Id of one request.", metavar="NAME"),
    client: options.OperatorClient,
) -> None:
    """List tenants with limits, running calls or costs: use and limit of each.

    Of a rate: what is missing in its bucket, and the bucket, which is filled with the rate (docs/operate/limits.md).
    """
    response = client.list_tenants(tenant)
    listed = [output.message_object(one) for one in response.tenants]
    rows = []
    for one in response.tenants:
        who = (one.tenant, str(one.running), f"{one.cost_last_hour:.4g}")
        uses = [(use.name, f"{use.used:.4g}", f"{use.limit:.4g}") for use in one.limits]
        rows += [(*who, *use) for use in uses or [("-", "-", "-")]]
    headers = ("tenant", "running", f"{response.currency} last hour", "limit", "used", "of")
    described = {"currency": response.currency, "tenants": listed}
    output.show(described, lambda: output.write_table(headers, sorted(rows)))


@tenants.command()
def forget(
    tenant: str = Argument(..., help="", metavar="NAME"),
    yes: bool = Option(False, "--yes", help="Do not ask for confirmation."),
    address: options.Address = None,
) -> None:
    """Delete everything of a tenant: jobs, API keys, answers, records, audit, outcomes, dead letters.

    Costs and counts stay. It can be called again when it was interrupted.
    """
    if not yes:
        output.confirm(f"Delete all that is kept of {tenant}?")
    # Without identities the metadata says whose jobs are listed; with them the operator sees all.
    named = None if os.environ.get(API_KEY_VARIABLE) else tenant
    with options.connect(named, address) as client:
        done = client.forget_tenant(tenant)
        jobs = _delete_jobs(client, tenant)
    counts = {"jobs": jobs, **output.message_object(done)}
    silent, failed = counts.pop("unreached_gateways"), None
    del counts["kept"]
    if silent:
        failed = ("GATEWAYS_UNREACHED", f"{', '.join(silent)} did not answer: call it again")
    headers, described = ("kind", "deleted"), {**counts, "unreached_gateways": silent}
    output.show(described, lambda: output.write_table(headers, counts.items()), failed)


def _delete_jobs(client: Client, tenant: str) -> int:
    try:
        jobs = [job for job in client.jobs.list() if job.tenant == tenant]
    except JobsDisabled:
        return 0
    for job in jobs:
        with suppress(WrongJobState):  # it is over
            client.jobs.cancel(job.id)
        client.jobs.delete(job.id)
    return len(jobs)


def cache(
    *,
    action: Literal["clear"] = Argument(..., help="", metavar="clear", show_default=False),
    tenant: str = Option("", help="Only answers for this tenant.", metavar="NAME"),
    model: str = Option("", help="Only answers of this model.", metavar="NAME"),
    key: str = Option("", help="Only this answer, as `sluice explain` names it.", metavar="KEY"),
    client: options.OperatorClient,
) -> None:
    """Delete cached answers.

    Those of all requests, or of a tenant, of a model, or of one request.
    """
    unreached = client.clear_answers(tenant, model, key)

    def write() -> None:
        for name in unreached:
            what = f"gateway {name} did not respond; it may serve cached answers until they expire"
            print(what, file=sys.stderr)

    output.show({"unreached_gateways": unreached}, write)
