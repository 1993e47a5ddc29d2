"""`sluice router`: trains a router on recorded outcomes, and scores prompts with it."""

import csv
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from typer import Argument, Option

from cli import options, output
from cli.commands import Commands
from cli.failure import CommandFailed
from cli.files import NewFile, open_table

if TYPE_CHECKING:
    from gateway.routing.learned.model import Head
    from learning.outcomes import RouterOutcome
    from sluice.v1.admin_pb2 import StreamOutcomesResponse


MORE: Final = (
    "the answers of both models are needed: give one a share of the other's requests with routing.shadows"
    " (docs/concepts/routing.md), and ask again when there has been more traffic"
)
"""How to get outcomes of both sides."""


@dataclass(frozen=True, kw_only=True)
class MeshOutcomes:
    """Which outcomes of which mesh; no tenants stand for all, no hours for all the time that they are kept."""

    from_mesh: bool = Option(False, "--from-mesh", help="Learn from stored outcomes, too.")
    tenant: list[str] | None = Option(
        None, help="--from-mesh: only of this tenant.", metavar="NAME"
    )
    hours: float | None = Option(None, help="--from-mesh: of so many hours until now.", min=0)
    pair: str | None = Option(None, help="--from-mesh: of these two models.", metavar="WEAK/STRONG")
    keep: Path | None = Option(None, help="--from-mesh: write OUTCOMES.csv.", metavar="FILE")
    address: options.Address = None

    def fetch(self) -> "list[StreamOutcomesResponse]":
        """Return the rows of one pair of models, each request once; none unless `from_mesh`.

        Those that have the quality of both models are written to `keep`, if it is set.

        Raises:
            CommandFailed: options do not fit, there are no outcomes of one pair, or `keep` cannot be written.
            SluiceError: the outcomes cannot be listed.
        """
        if not self.from_mesh:
            if self.tenant or self.hours is not None or self.pair or self.keep:
                message = "--tenant, --hours, --pair and --keep belong to --from-mesh"
                raise CommandFailed("USAGE", message)
            return []
        since = 0 if self.hours is None else int((time.time() - self.hours * 3600) * 1000)
        with options.connect(address=self.address) as client:
            listed = client.outcomes(self.tenant or (), since_unix_ms=since)
            rows = {row.request_id: row for row in listed}  # the latest of a request counts
        pair = _pair(rows.values(), self.pair)
        of_pair = [row for row in rows.values() if _pair_of(row) == pair]
        if self.keep is not None:
            _keep(self.keep, of_pair)
        return of_pair


def _merged_outcomes(
    files: Sequence[Path],
    own: "Sequence[StreamOutcomesResponse] | None",
) -> list["RouterOutcome"]:
    from learning import outcomes

    with ExitStack() as opened:
        tables = [(path.name, *opened.enter_context(open_table(path))) for path in files]
        sources = [outcomes.Source(*table) for table in tables]
        if own is not None:
            sources.append(outcomes.mesh_source(own))
        try:
            return outcomes.merge(sources)
        except outcomes.BadOutcomes as error:
            few = own is not None and isinstance(error, outcomes.TooFewOutcomes)
            raise CommandFailed("BAD_OUTCOMES", f"{error}{f'; {MORE}' * few}") from error


def _keep(path: Path, rows: "Sequence[StreamOutcomesResponse]") -> None:
    from learning import outcomes

    with NewFile(path) as new:
        writer = csv.DictWriter(new, outcomes.COLUMNS)
        writer.writeheader()
        writer.writerows(outcomes.cells_of(row) for row in rows if outcomes.is_complete(row))
        new.complete()


def _pair(rows: "Collection[StreamOutcomesResponse]", pair_name: str | None) -> str:
    counts = Counter(_pair_of(row) for row in rows)
    if not counts:
        raise CommandFailed("NO_OUTCOMES", f"the mesh has kept no outcomes yet; {MORE}")
    if len(counts) == 1 and pair_name is None:
        return next(iter(counts))
    if pair_name is None or pair_name not in counts:
        pairs = ", ".join(f"{pair} ({count})" for pair, count in counts.most_common())
        raise CommandFailed("NO_OUTCOMES", f"--pair: choose one of {pairs}")
    return pair_name


def _pair_of(row: "StreamOutcomesResponse") -> str:
    return f"{row.weak_model}/{row.strong_model}"


router = Commands(
    "Learn which prompts need the large model. "
    "Its input is OUTCOMES.csv: prompt_id, prompt, weak, strong (0 to 1), optionally weak_response."
)


@router.command("train")
def train_(
    *,
    files: list[Path] | None = Argument(
        None, help="Outcomes, plain or .gz.", metavar="OUTCOMES.csv"
    ),
    out: Path = Option(..., help="The router.", show_default=False),
    cascade: bool = Option(False, "--cascade", help="Read weak_response, of every row."),
    seed: int = Option(0, help="Random seed of the training.", min=0),
    mesh: MeshOutcomes,
) -> None:
    """Train a router on recorded outcomes, on those stored by the mesh (--from-mesh), or both."""
    from gateway.routing.learned import artefact
    from learning import report
    from learning.outcomes import mesh_one_sided
    from learning.train import train

    if not files and not mesh.from_mesh:
        raise CommandFailed("USAGE", "name OUTCOMES.csv, or learn --from-mesh")
    own = mesh.fetch()
    if cascade:
        own = [row for row in own if row.weak_answer.strip()]
    rows = _merged_outcomes(files or (), own if mesh.from_mesh else None)
    without = next((row.prompt_id for row in rows if row.answer is None), None)
    if cascade and without is not None:
        raise CommandFailed(
            "BAD_OUTCOMES", f"--cascade needs weak_response in every row; {without!r} has none"
        )
    one_sided = mesh_one_sided(own, {row.prompt_id for row in rows})
    trained = train(rows, seed, one_sided)
    try:
        saved = artefact.save_to(trained, out)
    except OSError as error:
        raise CommandFailed("FILE", f"{out} cannot be written: {error.strerror}") from error
    summary = {"router": str(out), "bytes": out.stat().st_size}
    if mesh.from_mesh:
        summary |= {"outcomes": len(rows), "one_sided": len(one_sided)}
    output.show({**summary, **report.describe(saved)})


@router.command()
def score(
    *,
    learned_by: Path = Argument(..., help="", metavar="ROUTER", show_default=False),
    prompts: Path = Argument(..., help="Prompts, plain or .gz.", metavar="PROMPTS.csv"),
    out: Path = Option(..., help="Scores of prompts."),
    cascade: bool = Option(False, "--cascade", help="Also read weak_response."),
) -> None:
    """Score prompts with a router."""
    from gateway.routing.learned import artefact

    try:
        learned = artefact.load(learned_by)
    except artefact.BadArtefact as error:
        raise CommandFailed("BAD_ROUTER", str(error)) from error
    head = learned.cascade if cascade else learned.prompts
    if head is None:
        raise CommandFailed("NO_CASCADE_HEAD", f"{learned_by} was trained without weak_response")
    with NewFile(out) as new:
        scored = list(_scored(head, prompts, cascade))
        csv.writer(new).writerows([("prompt_id", "score"), *scored])
        new.complete()
    output.show({"scores": str(out), "rows": len(scored), "version": learned.version})


def _scored(head: "Head", path: Path, cascade: bool) -> Iterator[tuple[str, str]]:
    from learning import outcomes

    needed = ("prompt_id", "prompt", *(("weak_response",) if cascade else ()))
    seen: set[str] = set()
    try:
        with open_table(path) as (columns, rows):
            outcomes.require_columns(path.name, columns, needed)
            for number, row in enumerate(rows, 2):
                place = f"{path.name} row {number}"
                prompt_id = outcomes.text_of(place, row, "prompt_id")
                prompt = outcomes.text_of(place, row, "prompt")
                if prompt_id in seen:
                    raise outcomes.BadOutcomes(f"{place}: prompt_id {prompt_id!r} comes twice")
                seen.add(prompt_id)
                # An empty answer is an answer: the small model said nothing.
                score = head.score(prompt, row.get("weak_response") or "")
                yield prompt_id, f"{score.gain:.9g}"
    except outcomes.BadOutcomes as error:
        raise CommandFailed("BAD_PROMPTS", str(error)) from error
