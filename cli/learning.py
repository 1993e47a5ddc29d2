"""Training data of `sluice router train`: files, and outcomes that a mesh has kept of its own traffic."""

import csv
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cli import tables
from cli.failure import CommandFailed

if TYPE_CHECKING:
    from gateway.routing.learned.model import LearnedRouter
    from learning.outcomes import Outcome, Source
    from sluice.v1.admin_pb2 import StreamOutcomesResponse

MORE: Final = (
    "the answers of both models are needed: give one a share of the other's requests with routing.shadows"
    " (docs/concepts/routing.md), and ask again when there has been more traffic"
)
"""How to get outcomes of both sides."""


@dataclass(frozen=True)
class MeshOutcomes:
    """Which outcomes of which mesh; no tenants stand for all, no hours for all the time that they are kept."""

    address: str
    tenants: Sequence[str] = ()
    hours: float | None = None
    pair: str | None = None
    """WEAK/STRONG, where several pairs of models are compared."""
    keep: Path | None = None
    """Where to write those that have both sides as an OUTCOMES file."""


@dataclass(frozen=True)
class TrainingOptions:
    """Options of training, and the outcomes to fetch from a mesh."""

    cascade: bool = False
    seed: int = 0
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    mesh: MeshOutcomes | None = None


def learn(
    files: Sequence[Path], options: TrainingOptions
) -> tuple["LearnedRouter", dict[str, Any]]:
    """The router, and how many rows the mesh gave.

    Raises:
        CommandFailed: nothing can be learned from them.
        SluiceError: the mesh does not answer, or keeps none of a tenant.
    """
    from learning.outcomes import mesh_one_sided
    from learning.train import train

    if not files and options.mesh is None:
        raise CommandFailed("USAGE", "name OUTCOMES.csv, or learn --from-mesh")
    own = [] if options.mesh is None else _fetch(options.mesh)
    if options.cascade:
        own = [row for row in own if row.weak_answer.strip()]
    rows = _gathered(files, own, options)
    without = next((row.prompt_id for row in rows if row.answer is None), None)
    if options.cascade and without is not None:
        raise CommandFailed(
            "BAD_OUTCOMES", f"--cascade needs weak_response in every row; {without!r} has none"
        )
    one_sided = mesh_one_sided(own, options.tenant_weights, {row.prompt_id for row in rows})
    counts: dict[str, Any] = {}
    if options.mesh is not None:
        counts = {"outcomes": len(rows), "one_sided": len(one_sided)}
    return train(rows, options.seed, one_sided), counts


def _gathered(
    files: Sequence[Path], own: "Sequence[StreamOutcomesResponse]", options: TrainingOptions
) -> list["Outcome"]:
    from learning import outcomes

    with ExitStack() as opened:
        sources = [_source(opened, path, options.tenant_weights) for path in files]
        if options.mesh is not None:
            sources.append(outcomes.mesh_source(own, options.tenant_weights))
        try:
            return outcomes.gather(sources)
        except outcomes.TooFewOutcomes as error:
            hint = f"; {MORE}" * (options.mesh is not None)
            raise CommandFailed("BAD_OUTCOMES", f"{error}{hint}") from error
        except outcomes.BadOutcomes as error:
            raise CommandFailed("BAD_OUTCOMES", str(error)) from error


def _source(opened: ExitStack, path: Path, tenant_weights: Mapping[str, float]) -> "Source":
    from learning.outcomes import Source

    columns, rows = opened.enter_context(tables.open_table(path))
    return Source(path.name, columns, rows, tenant_weights=tenant_weights)


def _fetch(asked: MeshOutcomes) -> "list[StreamOutcomesResponse]":
    """The rows of one pair of models, each request once."""
    from sluice.client.blocking import Client

    since = 0 if asked.hours is None else int((time.time() - asked.hours * 3600) * 1000)
    with Client(asked.address) as client:
        listed = client.outcomes(asked.tenants, since_unix_ms=since)
        rows = {row.request_id: row for row in listed}  # the latest of a request counts
    pair = _pair(rows.values(), asked.pair)
    of_pair = [row for row in rows.values() if _pair_of(row) == pair]
    if asked.keep is not None:
        _keep(asked.keep, of_pair)
    return of_pair


def _keep(path: Path, rows: "Sequence[StreamOutcomesResponse]") -> None:
    from learning import outcomes

    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, outcomes.COLUMNS)
            writer.writeheader()
            writer.writerows(outcomes.cells_of(row) for row in rows if outcomes.is_complete(row))
    except OSError as error:
        raise CommandFailed("FILE", f"{path} cannot be written: {error.strerror}") from error


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
