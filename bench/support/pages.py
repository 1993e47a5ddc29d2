"""Numbers on pages are those of bench/results: `render` writes them, and a test compares.

A table whose first header is "figure" has a row for each figure, named in backticks in its first cell, or in a comment
there, `<!-- NAME -->`. The first number of a cell is written in the columns "ours", "peer" and "ratio" and in those
whose header has a comment with the key of a further value, `<!-- ttft_p50_ms -->`. The column "measured" gets
the commit and what limits the figure. A row without numbers is of a figure that has not been measured.
In other text a number is followed by `<!-- NAME.ours -->`, with peer, ratio or the key of a value.
A number with " %" behind it is written in percent. `<!-- results: SUFFIX -->` sets
whose files the rest of the page is from, else `cpu-2-cores`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

SUFFIX: Final = "cpu-2-cores"
FIELDS: Final = ("ours", "peer", "ratio")
LOAD_MAX: Final = 3.0
UNITS: Final = ("ms", "us", "tokens/s")
"""Written behind the number of a new cell."""
NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
MARKED: Final = re.compile(r"(-?\d[\d,]*(?:\.\d+)?)([^\d<|]*)<!-- (\w+)\.(\w+) -->")
COMMENT: Final = re.compile(r"<!-- (\w+) -->")
CHOICE: Final = re.compile(r"<!-- results: (\S+) -->")

Line = Mapping[str, Any]
Lines = Mapping[str, Line]


class PageError(ValueError):
    """A page names what bench/results does not hold."""


def load_results(folder: Path) -> dict[str, Lines]:
    """The lines of all files by suffix and figure.

    Raises:
        PageError: two lines of one suffix have the same figure.
    """
    found: dict[str, dict[str, Line]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        lines = found.setdefault(path.stem.partition("-")[2], {})
        for line in read_lines(path):
            if line["figure"] in lines:
                raise PageError(f"{path.name}: {line['figure']} is there twice")
            lines[line["figure"]] = line
    return dict(found)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The figures of one file; other lines, such as engine_cost, are left out."""
    if not path.exists():
        return []
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines() if text]
    return [line for line in lines if "ours" in line]


def render(page: str, results: Mapping[str, Lines]) -> str:
    """The page with the numbers of ``results``.

    Raises:
        PageError: a figure or a value of it is missing; with the line's number.
    """
    suffix, columns, done = SUFFIX, list[str](), []
    for number, line in enumerate(page.split("\n"), start=1):
        if choice := CHOICE.search(line):
            suffix = choice[1]
        cells = line.split("|")
        columns = _columns(cells, columns)
        lines = results.get(suffix, {})
        try:
            if columns and not _is_header(cells):
                line = "|".join(_row(cells, columns, lines))
            done.append(MARKED.sub(partial(_marked, lines), line))
        except PageError as error:
            raise PageError(f"line {number}: {error}") from error
    return "\n".join(done)


def shown(value: float) -> str:
    """Three digits, four of large numbers."""
    size = abs(value)
    if size >= 1000:
        return f"{float(f'{value:.4g}'):,.0f}"
    if not size:
        return "0"
    decimals = (
        0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3 if size >= 0.1 else 4
    )
    return f"{value:.{decimals}f}"


def measured(line: Line) -> str:
    """The cell of the column "measured"; other programs that wanted the cores are a limit."""
    load = line.get("load", 0.0)
    busy = f"load {load:.0f}" if load > LOAD_MAX else ""
    limits = [line.get("label"), line.get("limits"), busy]
    return ", ".join([line["commit"], *(limit for limit in limits if limit)])


def _is_header(cells: list[str]) -> bool:
    return not cells[1].strip(" :-") or _is_figures(cells)


def _is_figures(cells: list[str]) -> bool:
    return len(cells) > 2 and cells[1].strip() == "figure"


def _columns(cells: list[str], before: list[str]) -> list[str]:
    """The keys of the table that this line belongs to; none outside of tables of figures."""
    if len(cells) < 3 or cells[0].strip():
        return []
    return [_key(cell) for cell in cells] if _is_figures(cells) else before


def _key(cell: str) -> str:
    comment = COMMENT.search(cell)
    return comment[1] if comment else cell.strip()


def _row(cells: list[str], columns: list[str], lines: Lines) -> Iterator[str]:
    named = COMMENT.search(cells[1]) or re.search(r"`(\w+)`", cells[1])
    if named is None or len(cells) != len(columns):
        raise PageError("a row of a table of figures names one, and has a cell for each column")
    if named[1] not in lines and not _numbers(cells, columns):
        blank = zip(columns, cells, strict=True)
        yield from (" not measured " if key == "measured" else cell for key, cell in blank)
        return
    line = _line(lines, named[1])
    for key, cell in zip(columns, cells, strict=True):
        if key == "measured":
            yield f" {measured(line)} "
        elif not cell.strip() and (key in FIELDS or key in line.get("also", {})):
            yield _new_cell(line, key)
        elif (key in FIELDS or key in line.get("also", {})) and NUMBER.search(cell):
            yield NUMBER.sub(partial(_text, line, key), cell, count=1)
        else:
            yield cell


def _new_cell(line: Line, key: str) -> str:
    """What an empty cell of a figure that has been measured gets."""
    value = line[key] if key in FIELDS else line["also"][key]
    if value is None:
        return " - "
    if (line["unit"] == "share" or line["unit"].startswith("of ")) and key != "ratio":
        return f" {100 * value:.1f} % "
    unit = line["unit"] if line["unit"] in UNITS and key in ("ours", "peer") else ""
    return f" {shown(value)} {unit}".rstrip() + " "


def _numbers(cells: list[str], columns: list[str]) -> bool:
    """Whether the row says what was measured; one that does not is of a figure that nobody has measured yet."""
    kept = [cell for key, cell in zip(columns, cells, strict=True) if key in FIELDS]
    return any(NUMBER.search(cell) for cell in kept)


def _marked(lines: Lines, found: re.Match[str]) -> str:
    line = _line(lines, found[3])
    text = _text(line, found[4], found)
    return f"{text}{found[2]}<!-- {found[3]}.{found[4]} -->"


def _line(lines: Lines, figure: str) -> Line:
    if figure not in lines:
        raise PageError(f"bench/results has no figure {figure}")
    return lines[figure]


def _text(line: Line, key: str, found: re.Match[str]) -> str:
    value = line[key] if key in FIELDS else line.get("also", {}).get(key)
    if value is None:
        raise PageError(f"{line['figure']} has no {key}")
    percent = found.string[found.end(1 if found.re is MARKED else 0) :].startswith(" %")
    if percent and not line["unit"].startswith("%") and not key.endswith("_percent"):
        return f"{100 * value:.1f}"
    return shown(value)
