"""Training data of `sluice router train`: files, and outcomes that a mesh has kept of its own traffic."""

import csv
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cli import options
from cli.failure import CommandFailed
from cli.files import NewFile, open_table
from sluice.client import Client

if TYPE_CHECKING:
    from gateway.routing.learned.model import LearnedRouter
    from learning.outcomes import Outcome
    from sluice.v1.admin_pb2 import StreamOutcomesResponse

MORE: Final = (
    "the answers of both models are needed: give one a share of the other's requests with routing.shadows"
    " (docs/concepts/routing.md), and ask again when there has been more traffic"
)
"""How to get outcomes of both sides."""


@dataclass(frozen=True, kw_only=True)
class MeshOutcomes:
    """Which outcomes of which mesh; no tenants stand for all, no hours for all the time that they are kept."""

    from_mesh: Annotated[
        bool,
        typer.Option("--from-mesh", help="train: also from what the mesh has kept of its traffic."),
    ] = False
    tenant: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="--from-mesh: of this tenant; may be repeated."),
    ] = None
    hours: Annotated[
        float | None, typer.Option(min=0, help="--from-mesh: of so many hours until now.")
    ] = None
    pair: Annotated[
        str | None,
        typer.Option(metavar="WEAK/STRONG", help="--from-mesh: of these two models."),
    ] = None
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="--from-mesh: write the rows that have both sides as OUTCOMES.csv."
        ),
    ] = None
    address: options.Address = options.ADDRESS

    def fetch(self) -> "list[StreamOutcomesResponse]":
        """The rows of one pair of models, each request once; none unless ``from_mesh``."""
        if not self.from_mesh:
            if self.tenant or self.hours is not None or self.pair or self.keep:
                message = "--tenant, --hours, --pair and --keep belong to --from-mesh"
                raise CommandFailed("USAGE", message)
            return []
        since = 0 if self.hours is None else int((time.time() - self.hours * 3600) * 1000)
        with Client(self.address) as client:
            listed = client.outcomes(self.tenant or (), since_unix_ms=since)
            rows = {row.request_id: row for row in listed}  # the latest of a request counts
        pair = _pair(rows.values(), self.pair)
        of_pair = [row for row in rows.values() if _pair_of(row) == pair]
        if self.keep is not None:
            _keep(self.keep, of_pair)
        return of_pair


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How it is learned."""

    cascade: Annotated[
        bool, typer.Option("--cascade", help="Read weak_response as well; every row must have it.")
    ] = False
    seed: Annotated[int, typer.Option(min=0, help="Of training and of bootstrap draws.")] = 0
    weight: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TENANT=WEIGHT",
            help="How much a tenant's rows count in training; 1 by default.",
        ),
    ] = None

    def weights(self) -> dict[str, float]:
        """By tenant."""
        weights = {}
        for pair in self.weight or ():
            tenant, _, number = pair.rpartition("=")
            try:
                weights[tenant] = float(number)
            except ValueError:
                raise CommandFailed("USAGE", f"--weight {pair}: TENANT=NUMBER") from None
            if not tenant or not 0 <= weights[tenant] < float("inf"):
                raise CommandFailed("USAGE", f"--weight {pair}: a tenant, and a number from 0 up")
        return weights


def learn(
    files: Sequence[Path], training: TrainingOptions, mesh: MeshOutcomes
) -> tuple["LearnedRouter", dict[str, Any]]:
    """The router, and how many rows the mesh gave.

    Raises:
        CommandFailed: nothing can be learned from them.
        SluiceError: the mesh does not answer, or keeps none of a tenant.
    """
    from learning.outcomes import mesh_one_sided
    from learning.train import train

    if not files and not mesh.from_mesh:
        raise CommandFailed("USAGE", "name OUTCOMES.csv, or learn --from-mesh")
    weights, own = training.weights(), mesh.fetch()
    if training.cascade:
        own = [row for row in own if row.weak_answer.strip()]
    rows = _gathered(files, own if mesh.from_mesh else None, weights)
    without = next((row.prompt_id for row in rows if row.answer is None), None)
    if training.cascade and without is not None:
        raise CommandFailed(
            "BAD_OUTCOMES", f"--cascade needs weak_response in every row; {without!r} has none"
        )
    one_sided = mesh_one_sided(own, weights, {row.prompt_id for row in rows})
    counts: dict[str, Any] = {}
    if mesh.from_mesh:
        counts = {"outcomes": len(rows), "one_sided": len(one_sided)}
    return train(rows, training.seed, one_sided), counts


def _gathered(
    files: Sequence[Path],
    own: "Sequence[StreamOutcomesResponse] | None",
    weights: Mapping[str, float],
) -> list["Outcome"]:
    from learning import outcomes

    with ExitStack() as opened:
        tables = [(path.name, *opened.enter_context(open_table(path))) for path in files]
        sources = [outcomes.Source(*table, tenant_weights=weights) for table in tables]
        if own is not None:
            sources.append(outcomes.mesh_source(own, weights))
        try:
            return outcomes.gather(sources)
        except outcomes.BadOutcomes as error:
            few = own is not None and isinstance(error, outcomes.TooFewOutcomes)
            raise CommandFailed("BAD_OUTCOMES", f"{error}{f'; {MORE}' * few}") from error


def _keep(path: Path, rows: "Sequence[StreamOutcomesResponse]") -> None:
    from learning import outcomes

    with NewFile(path) as new:
        with new.writing() as file:
            writer = csv.DictWriter(file, outcomes.COLUMNS)
            writer.writeheader()
            writer.writerows(outcomes.cells_of(row) for row in rows if outcomes.is_complete(row))
        new.complete()


def _pair(rows: "Collection[StreamOutcomesResponse]", wanted: str | None) -> str:
    counts = Counter(_pair_of(row) for row in rows)
    if not counts:
        raise CommandFailed("NO_OUTCOMES", f"the mesh has kept no outcomes yet; {MORE}")
    told = ", ".join(f"{pair} ({count})" for pair, count in counts.most_common())
    if wanted is None and len(counts) > 1:
        raise CommandFailed(
            "USAGE", f"outcomes of several pairs are kept: {told}; choose one with --pair"
        )
    if wanted is not None and wanted not in counts:
        raise CommandFailed("NO_OUTCOMES", f"no outcomes of {wanted} are kept; there are {told}")
    return wanted or next(iter(counts))


def _pair_of(row: "StreamOutcomesResponse") -> str:
    return f"{row.weak_model}/{row.strong_model}"
