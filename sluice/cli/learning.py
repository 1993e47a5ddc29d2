"""What `sluice router` learns from: files, and outcomes that the mesh has kept."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.cli import own_outcomes, tables
from sluice.cli.failure import CommandFailed
from sluice.cli.own_outcomes import Asked

if TYPE_CHECKING:
    from gateway.routing.learned.outcomes import Outcome, Source
    from gateway.routing.learned.router import LearnedRouter
    from sluice.v1.admin_pb2 import StreamOutcomesResponse


@dataclass(frozen=True)
class Lesson:
    """How to learn, and what from beside files."""

    cascade: bool = False
    seed: int = 0
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    mesh: Asked | None = None
    keep: Path | None = None


def learn(files: Sequence[Path], lesson: Lesson) -> tuple["LearnedRouter", dict[str, Any]]:
    """The router, and what is told of the rows of the mesh.

    Raises:
        CommandFailed: nothing can be learned from them.
        SluiceError: the mesh does not answer, or keeps none of a tenant.
    """
    from gateway.routing.learned import one_sided

    if not files and lesson.mesh is None:
        raise CommandFailed("USAGE", "name OUTCOMES.csv, or learn --from-mesh")
    own = _own(lesson)
    rows = _gathered(files, own, lesson)
    without = next((row.prompt_id for row in rows if row.answer is None), None)
    if lesson.cascade and without is not None:
        raise CommandFailed(
            "BAD_OUTCOMES", f"--cascade needs weak_response in every row; {without!r} has none"
        )
    known = {row.prompt_id for row in rows}
    halves = [
        row
        for row in own_outcomes.one_sided_of(own, lesson.tenant_weights)
        if row.prompt_id not in known
    ]
    told: dict[str, Any] = {}
    if lesson.mesh is not None:
        told = {"outcomes": len(rows), "one_sided": len(halves)}
    return one_sided.train(rows, halves, lesson.seed), told


def _own(lesson: Lesson) -> "list[StreamOutcomesResponse]":
    """Rows of the mesh; a cascade is learned from those with an answer."""
    if lesson.mesh is None:
        return []
    rows = own_outcomes.fetch(lesson.mesh)
    if lesson.keep is not None:
        own_outcomes.keep(lesson.keep, rows)
    return [row for row in rows if row.weak_answer.strip() or not lesson.cascade]


def _gathered(
    files: Sequence[Path], own: "Sequence[StreamOutcomesResponse]", lesson: Lesson
) -> list["Outcome"]:
    from gateway.routing.learned import outcomes

    with ExitStack() as opened:
        sources = [_source(opened, path, lesson.tenant_weights) for path in files]
        if lesson.mesh is not None:
            sources.append(own_outcomes.source_of(own, lesson.tenant_weights))
        try:
            return outcomes.gather(sources)
        except outcomes.TooFewOutcomes as error:
            hint = f"; {own_outcomes.MORE}" * (lesson.mesh is not None)
            raise CommandFailed("BAD_OUTCOMES", f"{error}{hint}") from error
        except outcomes.BadOutcomes as error:
            raise CommandFailed("BAD_OUTCOMES", str(error)) from error


def _source(opened: ExitStack, path: Path, tenant_weights: Mapping[str, float]) -> "Source":
    from gateway.routing.learned.outcomes import Source

    columns, rows = opened.enter_context(tables.open_table(path))
    return Source(path.name, columns, rows, tenant_weights=tenant_weights)
