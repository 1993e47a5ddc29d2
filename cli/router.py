"""`sluice router`: trains a router on recorded outcomes, scores prompts with it, and reports its quality."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cli import output
from cli.failure import CommandFailed
from cli.files import NewFile, open_table
from cli.learning import MeshOutcomes, TrainingOptions, learn

if TYPE_CHECKING:
    from gateway.routing.learned.calibration import Calibration
    from gateway.routing.learned.model import LearnedRouter


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
    training: TrainingOptions,
    mesh: MeshOutcomes,
) -> None:
    """Learn which prompts need the large model.

    From recorded outcomes, from those that the mesh has kept (--from-mesh), or both. CSV files, plain or .gz.
    OUTCOMES: prompt_id, prompt, weak, strong (0 to 1), optionally weak_response and tenant. PROMPTS: prompt_id, prompt,
    with --cascade also weak_response. SCORES: prompt_id, score; higher goes to the large model sooner.
    """
    given = files or []
    if mesh.from_mesh and action != "train":
        raise CommandFailed("USAGE", "--from-mesh belongs to train")
    if action == "train":
        told = _train(given, out, training, mesh)
    elif action == "score":
        told = _score(given, out, training.cascade)
    else:
        told = _report(given, out, training)
    output.show(told, lambda: _show(told))


def _train(
    files: Sequence[Path], out: Path, training: TrainingOptions, mesh: MeshOutcomes
) -> dict[str, Any]:
    from gateway.routing.learned import artefact
    from learning import report

    trained, told = learn(files, training, mesh)
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
                answer = row.get("weak_response") or ""
                score = (
                    learned.score_with_answer(prompt, answer) if cascade else learned.score(prompt)
                )
                yield prompt_id, f"{score.gain:.9g}"
    except outcomes.BadOutcomes as error:
        raise CommandFailed("BAD_PROMPTS", str(error)) from error


def _report(files: Sequence[Path], out: Path, training: TrainingOptions) -> dict[str, Any]:
    from learning import report

    if len(files) != 1:
        raise CommandFailed("USAGE", "report takes one ROUTER or one OUTCOMES.csv")
    path = files[0]
    is_table = path.name.endswith((".csv", ".csv.gz"))
    learned = learn([path], training, MeshOutcomes())[0] if is_table else _load(path)
    told = report.describe(learned)
    out.mkdir(parents=True, exist_ok=True)
    for name, head in report.heads_of(learned).items():
        told["heads"][name] |= _measure(
            head, out / f"{name}.png", f"{path.name}: {name}", training.seed
        )
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
