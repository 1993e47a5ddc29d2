"""`sluice config`: a configuration file before it is used."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Argument

from cli import output
from cli.commands import Commands

if TYPE_CHECKING:
    from sluice.settings import Settings

config = Commands("Check a configuration file.")


@config.command()
def check(
    file: Path | None = Argument(None, help="YAML file; without one the defaults are checked."),
) -> None:
    """Check a file, the variables that override it, and the models that it names.

    Nothing is started, and no other machine is asked. All problems are listed with their lines. Exits with 0 when a
    mesh can start with it.
    """
    from supervisor.check import check as checked

    settings = checked(file)
    summary = dict(_summary(settings))
    lines = [f"  {name}: {value}" for name, value in summary.items()]
    output.show({"ok": True, **summary}, "\n".join([f"{file or 'defaults'}: ok", *lines]))


def _summary(settings: "Settings") -> Iterator[tuple[str, str]]:
    """Yield what a mesh with these settings would serve, where, and to whom."""
    from supervisor.disk import reserved

    models = (f"{model.name} ({model.engine}, {model.path})" for model in settings.models)
    yield "models", ", ".join(models)
    yield "default", settings.routing.default
    yield "grpc", settings.gateway.address
    # Unset and null differ: `sluice up` serves HTTP unless the file says null.
    is_off = "address" in settings.http.model_fields_set
    unset = "off" if is_off else "127.0.0.1:8000 with `sluice up`, else off"
    yield "http", settings.http.address or unset
    yield "nats", "external" if settings.nats.url else "embedded"
    yield (
        "callers",
        "must say who they are" if settings.identity.enabled else "are not asked who they are",
    )
    yield "disk", f"streams take {sum(reserved(settings).values()) / 1024**3:.1f} GiB at most"
