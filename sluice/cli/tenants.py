"""`sluice tenants`: what tenants use of their limits."""

from typing import Annotated

import typer

from sluice.cli import options, output
from sluice.client import Client

tenants = typer.Typer(help="Show what tenants use of their limits.", no_args_is_help=True)


@tenants.command("list")
def list_(
    tenant: Annotated[str, typer.Option(metavar="NAME", help="One of them.")] = "",
    address: options.Address = options.ADDRESS,
    as_json: options.Json = False,
) -> None:
    """List tenants with limits, running calls or costs: use and limit of each.

    Of a rate: what is missing in its bucket, and the bucket, which is filled with the rate (docs/limits.md).
    """
    with Client(address) as client:
        found = client.list_tenants(tenant)
    if as_json:
        output.write_json(
            {
                "currency": found.currency,
                "tenants": [
                    {
                        "tenant": one.tenant,
                        "running": one.running,
                        "cost_last_hour": one.cost_last_hour,
                        "limits": [
                            {"name": use.name, "limit": use.limit, "used": use.used}
                            for use in one.limits
                        ],
                    }
                    for one in found.tenants
                ],
            }
        )
        return
    rows = [
        (
            one.tenant,
            str(one.running),
            f"{one.cost_last_hour:.4g}",
            use.name,
            f"{use.used:.4g}",
            f"{use.limit:.4g}",
        )
        for one in found.tenants
        for use in one.limits
    ]
    rows += [
        (one.tenant, str(one.running), f"{one.cost_last_hour:.4g}", "-", "-", "-")
        for one in found.tenants
        if not one.limits
    ]
    headers = ("tenant", "running", f"{found.currency} last hour", "limit", "used", "of")
    output.write_table(headers, sorted(rows))
