"""`sluice certs`: the certificates of a mesh on this machine, or of one in containers."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from cli import options, output
from cli.commands import Commands, Group

if TYPE_CHECKING:
    from supervisor.certificates import Authority

certs = Commands("Make, list and renew certificates.")


def _authority(
    folder: Path | None = Option(None, help="Directory.  [default: tls in the state directory]"),
    state_dir: options.StateDir = None,
) -> "Authority":
    from supervisor.certificates import Authority
    from supervisor.state import StateDir

    return Authority(folder or StateDir(state_dir).tls)


OfMesh = Annotated["Authority", Group(_authority)]
Processes = Annotated[list[str] | None, Argument(help="[default: all]", metavar="[PROCESS]...")]


@certs.command()
def create(
    *,
    processes: Processes = None,
    host: list[str] | None = Option(None, help="Further host name or address, besides localhost."),
    authority: OfMesh,
) -> None:
    """Make an authority unless there is one, and a certificate for each process that has none.

    Without names: those of a mesh with one process of each kind.
    """
    from supervisor.plan import BATCHER, GATEWAY, JOBS, NATS, OPERATOR, TRITON

    default = (NATS, TRITON, BATCHER, GATEWAY, JOBS, OPERATOR)
    made = authority.ensure(processes or default, host or ())
    _show_made(made, "every process has a certificate already")


@certs.command("list")
def list_(authority: OfMesh) -> None:
    """List certificates, and how long they are valid."""
    listed = [
        {**asdict(one), "file": str(one.file), "expires": one.expires.isoformat()}
        for one in authority.issued()
    ]
    output.show({"certificates": listed}, lambda: output.write_records(listed, keys=1))


@certs.command()
def renew(
    *,
    processes: Processes = None,
    authority: OfMesh,
) -> None:
    """Make new certificates with new keys, of all processes or of some.

    Gateways take them with the next caller, connections to NATS when they connect again. Triton, and calls that run,
    take them when the process starts again.
    """
    _show_made(authority.renew(processes or []), "there is nothing to renew")


@certs.command()
def nats(
    tls_folder: Path = Option(..., help="Where nats-server finds its tls.crt, tls.key and ca.crt."),
    input_stream: list[str] | None = Option(
        None, help="Stream that jobs may read.", metavar="STREAM"
    ),
) -> None:
    """Print the part of nats-server's configuration that asks for certificates, and says what each process may do.

    All processes of a kind share a certificate, as replicas on Kubernetes do.
    """
    from sluice.wire.permissions import KINDS
    from supervisor.nats import render_accounts, render_tls

    users = {kind: (kind, "*") for kind in KINDS}
    text = render_tls(tls_folder) + render_accounts(users, input_stream or ())
    output.show({"configuration": text}, text.rstrip())


def _show_made(made: list[Path], nothing: str) -> None:
    files = [str(file) for file in made]
    output.show({"made": files}, "\n".join(files) or nothing)
