"""`sluice router`: trains a router on recorded outcomes, scores prompts with it, and reports its quality."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cli import options, output, tables
from cli.failure import CommandFailed
from cli.learning import MeshOutcomes, TrainingOptions, learn
from cli.new_file import NewFile
from cli.option_groups import Group

if TYPE_CHECKING:
    from gateway.routing.learned.calibration import Calibration
    from gateway.routing.learned.model import LearnedRouter


def _mesh_outcomes(
    from_mesh: Annotated[
        bool,
        typer.Option("--from-mesh", help="train: also from what the mesh has kept of its traffic."),
    ] = False,
    tenant: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="--from-mesh: of this tenant; may be repeated."),
    ] = None,
    hours: Annotated[
        float | None, typer.Option(min=0, help="--from-mesh: of so many hours until now.")
    ] = None,
    pair: Annotated[
        str | None,
        typer.Option(metavar="WEAK/STRONG", help="--from-mesh: of these two models."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="--from-mesh: write the rows that have both sides as OUTCOMES.csv."
        ),
    ] = None,
    address: options.Address = options.ADDRESS,
) -> MeshOutcomes | None:
    if from_mesh:
        return MeshOutcomes(address, tenant or (), hours, pair, keep)
    if tenant or hours is not None or pair or keep:
        raise CommandFailed("USAGE", "--tenant, --hours, --pair and --keep belong to --from-mesh")
    return None


def router(
    *,
    action: Annotated[
        Literal["train", "score", "report"],
        typer.Argument(show_default=False, metavar="train|score|report"),
    ],
    out: Annotated[
        Path,
        typer.Option(show_default=False, help="The router, the scores, or the report's directory."),
    ],
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILES",
            show_default=False,
            help="train: OUTCOMES.csv, one or more. score: ROUTER PROMPTS.csv. report: ROUTER or OUTCOMES.csv.",
        ),
    ] = None,
    cascade: Annotated[
        bool, typer.Option("--cascade", help="Read weak_response as well; every row must have it.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of training and of bootstrap draws.")] = 0,
    weight: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TENANT=WEIGHT",
            help="How much a tenant's rows count in training; 1 by default.",
        ),
    ] = None,
    mesh: Annotated[MeshOutcomes | None, Group(_mesh_outcomes)],
    as_json: options.Json = False,
) -> None:
    """Learn which prompts need the large model.

    From recorded outcomes, from those that the mesh has kept (--from-mesh), or both. CSV files, plain or .gz.
    OUTCOMES: prompt_id, prompt, weak, strong (0 to 1), optionally weak_response and tenant. PROMPTS: prompt_id, prompt,
    with --cascade also weak_response. SCORES: prompt_id, score; higher goes to the large model sooner.
    """
    if mesh is not None and action != "train":
        raise CommandFailed("USAGE", "--from-mesh belongs to train")
    if action == "train":
        training = TrainingOptions(cascade, seed, _tenant_weights(weight or []), mesh)
        told = _train(files or [], out, training)
    elif action == "score":
        told = _score(files or [], out, cascade)
    else:
        told = _report(files or [], out, cascade, seed)
    output.show(as_json, told, lambda: _show(told))


def _train(files: Sequence[Path], out: Path, training: TrainingOptions) -> dict[str, Any]:
    from gateway.routing.learned import artefact
    from learning import report

    trained, told = learn(files, training)
    try:
        saved = artefact.save_to(trained, out)
    except OSError as error:
        raise CommandFailed("FILE", f"{out} cannot be written: {error.strerror}") from error
    return {"router": str(out), "bytes": out.stat().st_size, **told, **report.describe(saved)}


def _score(files: Sequence[Path], out: Path, cascade: bool) -> dict[str, Any]:
    if len(files) != 2:
        raise CommandFailed("USAGE", "score takes ROUTER and PROMPTS.csv")
    learned = _load(files[0])
    if cascade and learned.cascade is None:
        raise CommandFailed("NO_CASCADE_HEAD", f"{files[0]} was trained without weak_response")
    with NewFile(out) as new:
        with new.writing() as file:
            writer, rows = csv.writer(file), 0
            writer.writerow(("prompt_id", "score"))
            for row in _scored(learned, files[1], cascade):
                writer.writerow(row)
                rows += 1
        new.complete()
    return {"scores": str(out), "rows": rows, "version": learned.version}


def _scored(learned: "LearnedRouter", path: Path, cascade: bool) -> Iterator[tuple[str, str]]:
    from learning import outcomes

    needed = ("prompt_id", "prompt", *(("weak_response",) if cascade else ()))
    seen: set[str] = set()
    try:
        with tables.open_table(path) as (columns, rows):
            outcomes.require_columns(path.name, columns, needed)
            for number, row in enumerate(rows, 2):
                place = f"{path.name} row {number}"
                prompt_id = outcomes.text_of(place, row, "prompt_id")
                prompt = outcomes.text_of(place, row, "prompt")
                if prompt_id in seen:
                    raise outcomes.BadOutcomes(f"{place}: prompt_id {prompt_id!r} comes twice")
                seen.add(prompt_id)
                # An empty answer is an answer: the small model said nothing.
                answer = row.get("weak_response") or ""
                score = (
                    learned.score_with_answer(prompt, answer) if cascade else learned.score(prompt)
                )
                yield prompt_id, f"{score.gain:.9g}"
    except outcomes.BadOutcomes as error:
        raise CommandFailed("BAD_PROMPTS", str(error)) from error


def _report(files: Sequence[Path], out: Path, cascade: bool, seed: int) -> dict[str, Any]:
    from learning import report

    if len(files) != 1:
        raise CommandFailed("USAGE", "report takes one ROUTER or one OUTCOMES.csv")
    path = files[0]
    is_table = path.name.endswith((".csv", ".csv.gz"))
    learned = learn([path], TrainingOptions(cascade, seed))[0] if is_table else _load(path)
    told = report.describe(learned)
    out.mkdir(parents=True, exist_ok=True)
    for name, head in report.heads_of(learned).items():
        told["heads"][name] |= _measure(head, out / f"{name}.png", f"{path.name}: {name}", seed)
    told["directory"] = str(out)
    (out / "report.json").write_text(json.dumps(told, indent=1) + "\n")
    return told


def _measure(head: "Calibration", picture: Path, title: str, seed: int) -> dict[str, Any]:
    from learning import report

    bands = report.bootstrap(head.gains, head.weak, head.strong, report.DRAWS, seed)
    told: dict[str, Any] = {"intervals_95": bands.figures}
    try:
        report.draw_curve(report.curve_of(head), bands, title, picture)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        output.note("no pictures: matplotlib is not installed (pip install 'matplotlib>=3.9,<4')")
        return {**told, "picture": None}
    return {**told, "picture": str(picture)}


def _load(path: Path) -> "LearnedRouter":
    from gateway.routing.learned import artefact

    try:
        return artefact.load(path)
    except artefact.BadArtefact as error:
        raise CommandFailed("BAD_ROUTER", str(error)) from error


def _tenant_weights(given: Sequence[str]) -> dict[str, float]:
    weights = {}
    for pair in given:
        tenant, _, number = pair.rpartition("=")
        try:
            weights[tenant] = float(number)
        except ValueError:
            raise CommandFailed("USAGE", f"--weight {pair}: TENANT=NUMBER") from None
        if not tenant or not 0 <= weights[tenant] < float("inf"):
            raise CommandFailed("USAGE", f"--weight {pair}: a tenant, and a number from 0 up")
    return weights


def _show(told: Mapping[str, Any]) -> None:
    for name, head in told.get("heads", {}).items():
        figures = ", ".join(f"{key} {value:.3g}" for key, value in head["held_out"].items())
        print(f"{name}: {head['rows']} outcomes, held out: {figures}")
        rows = [
            (t["target"], f"{t['threshold']:.4f}", f"{t['large_share']:.1%}", f"{t['quality']:.4f}")
            for t in head["targets"]
        ]
        output.write_table(("target", "threshold", "large share", "quality"), rows)
    rest = {key: value for key, value in told.items() if key != "heads"}
    print(" ".join(f"{key} {value}" for key, value in rest.items() if value != ""))
