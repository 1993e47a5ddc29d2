"""Recorded outcomes: rows of prompt_id, prompt, weak, strong and optionally more `COLUMNS`, checked here once.

A row is named by its number in its source; the header is row 1.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from sluice.v1.admin_pb2 import StreamOutcomesResponse

ROWS_MIN: Final = 30
"""Least number of outcomes that a router can be learned from."""
REQUIRED: Final = ("prompt_id", "prompt", "weak", "strong")
COLUMNS: Final = (*REQUIRED, "weak_response", "tenant")
MESH: Final = "the mesh"
"""Name of outcomes that a mesh has recorded."""
_FIRST_ROW: Final = 2


class BadOutcomes(ValueError):
    """Outcomes that nothing can be learned from; the message names source and row."""


class TooFewOutcomes(BadOutcomes):
    """Too few outcomes to learn from."""


@dataclass(frozen=True, slots=True)
class RouterOutcome:
    """Quality of a small and a large model's answers to one prompt."""

    prompt_id: str
    prompt: str
    weak: float
    """Quality of the small model's answer, from 0 (wrong) to 1 (right)."""
    strong: float
    answer: str | None = None
    """Answer of the small model."""
    weight: float = 1.0
    """Weight of this row in training."""


@dataclass(frozen=True, slots=True)
class OneSided:
    """Quality of one of the two models on one prompt; the other one is None."""

    prompt: str
    weak: float | None
    strong: float | None
    answer: str | None = None
    """Answer of the small model."""


@dataclass(frozen=True, slots=True)
class Source:
    """Rows under a name that errors show."""

    name: str
    columns: Sequence[str]
    rows: Iterable[Mapping[str, str | None]]
    repeats: bool = False
    """Whether rows with a known id are skipped; otherwise they are refused."""


def merge(sources: Sequence[Source]) -> list[RouterOutcome]:
    """Check and join the outcomes of all `sources`.

    Raises:
        BadOutcomes: a column is missing, an id comes twice, a label is no number in [0, 1], a row has no id or no
            prompt, or the quality of the small model, or its distance from the large one, is the same in all rows.
        TooFewOutcomes: there are fewer than `ROWS_MIN` rows.
    """
    outcomes: list[RouterOutcome] = []
    places: dict[str, str] = {}
    for source in sources:
        require_columns(source.name, source.columns, REQUIRED)
        for row, cells in enumerate(source.rows, _FIRST_ROW):
            place = f"{source.name} row {row}"
            outcome = _outcome(place, cells)
            if outcome.prompt_id in places:
                # The file was exported from this mesh, so its rows come again.
                if source.repeats:
                    continue
                raise BadOutcomes(
                    f"{place}: prompt_id {outcome.prompt_id!r} is already in {places[outcome.prompt_id]}"
                )
            places[outcome.prompt_id] = place
            outcomes.append(outcome)
    _require_classes(outcomes, ", ".join(source.name for source in sources))
    return outcomes


def mesh_source(rows: Iterable[StreamOutcomesResponse]) -> Source:
    """Return what a mesh has recorded of both models; `merge` skips its requests that an earlier source has."""
    cells = [cells_of(row) for row in rows if is_complete(row)]
    return Source(MESH, COLUMNS, cells, repeats=True)


def mesh_one_sided(
    rows: Iterable[StreamOutcomesResponse], complete_ids: Set[str]
) -> list[OneSided]:
    """Return what a mesh has recorded of one of the models, without the requests in `complete_ids`."""
    return [
        OneSided(
            row.prompt,
            row.weak if row.HasField("weak") else None,
            row.strong if row.HasField("strong") else None,
            row.weak_answer if row.weak_answer.strip() else None,
        )
        for row in rows
        if not is_complete(row) and row.request_id not in complete_ids
    ]


def is_complete(row: StreamOutcomesResponse) -> bool:
    """Return whether the quality of both models is recorded."""
    return row.HasField("weak") and row.HasField("strong")


def cells_of(row: StreamOutcomesResponse) -> dict[str, str | None]:
    """Return a complete row of the mesh as a row of an OUTCOMES file, with the columns `COLUMNS`."""
    return {
        "prompt_id": row.request_id,
        "prompt": row.prompt,
        "weak": repr(row.weak),
        "strong": repr(row.strong),
        "weak_response": row.weak_answer,
        "tenant": row.tenant,
    }


def require_columns(name: str, columns: Sequence[str], required: Sequence[str]) -> None:
    """Raise BadOutcomes if one of `required` is missing."""
    missing = [column for column in required if column not in columns]
    if missing:
        raise BadOutcomes(
            f"{name} row 1: no column {', '.join(missing)}; there are {', '.join(columns) or 'none'}"
        )


def text_of(place: str, cells: Mapping[str, str | None], column: str) -> str:
    """Return a cell that must not be empty; raises BadOutcomes."""
    value = cells.get(column)
    if value is None or not value.strip():
        raise BadOutcomes(f"{place}: {column} is empty")
    return value


def _outcome(place: str, cells: Mapping[str, str | None]) -> RouterOutcome:
    answer = cells.get("weak_response")
    return RouterOutcome(
        text_of(place, cells, "prompt_id"),
        text_of(place, cells, "prompt"),
        _label(place, cells, "weak"),
        _label(place, cells, "strong"),
        answer if answer and answer.strip() else None,
    )


def _label(place: str, cells: Mapping[str, str | None], column: str) -> float:
    text = text_of(place, cells, column)
    try:
        value = float(text)
    except ValueError:
        raise BadOutcomes(f"{place}: {column} is {text!r}, not a number") from None
    if not (math.isfinite(value) and 0 <= value <= 1):
        raise BadOutcomes(f"{place}: {column} is {text}, outside [0, 1]")
    return value


def _require_classes(outcomes: Sequence[RouterOutcome], name: str) -> None:
    rows = f"{name} rows {_FIRST_ROW} to {len(outcomes) + 1}"
    if len(outcomes) < ROWS_MIN:
        raise TooFewOutcomes(f"{name}: {len(outcomes)} outcomes, at least {ROWS_MIN} are needed")
    # A large model that is always right is fine: what it gains still differs from prompt to prompt.
    if len({outcome.weak for outcome in outcomes}) == 1:
        raise BadOutcomes(f"{rows}: only one class, weak is {outcomes[0].weak:g} in every row")
    if len({outcome.strong - outcome.weak for outcome in outcomes}) == 1:
        raise BadOutcomes(f"{rows}: only one class, strong never differs from weak")
