"""Outcomes that a mesh has kept of its own traffic, as `sluice router train --from-mesh` learns from them."""

import csv
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sluice.cli.failure import CommandFailed

if TYPE_CHECKING:
    from gateway.routing.learned.one_sided import OneSided
    from gateway.routing.learned.outcomes import Source
    from sluice.v1.admin_pb2 import StreamOutcomesResponse

COLUMNS: Final = ("prompt_id", "prompt", "weak", "strong", "weak_response", "tenant")
NAME: Final = "the mesh"
MORE: Final = (
    "the answers of both models are needed: give one a share of the other's requests with routing.shadows"
    " (docs/routing.md), and ask again when there has been more traffic"
)
"""How to get outcomes of both sides."""


@dataclass(frozen=True)
class Asked:
    """Which outcomes of which mesh; no tenants stand for all, no hours for all the time that they are kept."""

    address: str
    tenants: Sequence[str] = ()
    hours: float | None = None
    pair: str | None = None
    """WEAK/STRONG, where several pairs of models are compared."""


def fetch(asked: Asked) -> "list[StreamOutcomesResponse]":
    """The rows of one pair of models, each request once.

    Raises:
        CommandFailed: there are none, or of several pairs.
        SluiceError: the mesh does not answer, or keeps none of a tenant.
    """
    from sluice.client.blocking import Client

    since = 0 if asked.hours is None else int((time.time() - asked.hours * 3600) * 1000)
    with Client(asked.address) as client:
        listed = client.outcomes(asked.tenants, since_unix_ms=since)
        rows = {row.request_id: row for row in listed}  # of one that comes again the last holds
    pair = _pair(rows.values(), asked.pair)
    return [row for row in rows.values() if _pair_of(row) == pair]


def source_of(
    rows: "Sequence[StreamOutcomesResponse]", tenant_weights: Mapping[str, float]
) -> "Source":
    """Those that have both sides; what a file has already is left out."""
    from gateway.routing.learned.outcomes import Source

    cells = [_cells(row) for row in rows if is_complete(row)]
    return Source(NAME, COLUMNS, cells, tenant_weights=tenant_weights, repeats=True)


def one_sided_of(
    rows: "Sequence[StreamOutcomesResponse]", tenant_weights: Mapping[str, float]
) -> list["OneSided"]:
    """Those that have one side."""
    from gateway.routing.learned.one_sided import OneSided

    return [
        OneSided(
            row.request_id,
            row.prompt,
            row.weak if row.HasField("weak") else None,
            row.strong if row.HasField("strong") else None,
            row.weak_answer or None,
            tenant_weights.get(row.tenant, 1.0),
        )
        for row in rows
        if not is_complete(row)
    ]


def is_complete(row: "StreamOutcomesResponse") -> bool:
    """Whether both sides are known."""
    return row.HasField("weak") and row.HasField("strong")


def keep(path: Path, rows: "Sequence[StreamOutcomesResponse]") -> int:
    """Writes those that have both sides as an OUTCOMES file; returns how many."""
    complete = [_cells(row) for row in rows if is_complete(row)]
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(complete)
    except OSError as error:
        raise CommandFailed("FILE", f"{path} cannot be written: {error.strerror}") from error
    return len(complete)


def _cells(row: "StreamOutcomesResponse") -> dict[str, str | None]:
    return {
        "prompt_id": row.request_id,
        "prompt": row.prompt,
        "weak": repr(row.weak),
        "strong": repr(row.strong),
        "weak_response": row.weak_answer,
        "tenant": row.tenant,
    }


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
