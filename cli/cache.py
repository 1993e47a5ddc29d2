"""`sluice cache clear`: forgets answers that are kept for equal requests."""

import sys
from typing import Annotated, Literal

import typer

from cli import options, output


def cache(
    *,
    action: Annotated[Literal["clear"], typer.Argument(metavar="clear", show_default=False)],
    tenant: Annotated[str, typer.Option(help="Only the answers of this tenant.")] = "",
    model: Annotated[str, typer.Option(help="Only the answers of this model.")] = "",
    key: Annotated[str, typer.Option(help="One answer, as `sluice explain` names it.")] = "",
    client: options.OperatorClient,
) -> None:
    """Forget answers that are kept for equal requests: all, or those of a tenant, of a model, or one."""
    unreached = client.clear_answers(tenant, model, key)
    output.show({"unreached_gateways": unreached})
    for name in unreached:
        print(
            f"gateway {name} did not answer: it may give out what it has in memory until that is too old",
            file=sys.stderr,
        )
