"""Numbers on pages are those of bench/results: `render` writes them, and a test compares.

A table whose first header is "figure" has a row for each figure, named in backticks in its first cell; a row without
such a name stays as it is. Written are the
columns "ours", "peer", "ratio" (with its interval) and "measured" (commit, processor, busy cores before, what limits
the figure), and those whose header has a comment with the key of a further value, `<!-- ttft_p50_ms -->`; a cell has a
line for each processor that measured the figure. A row whose figure is in no result says "not measured".
In other text a number is followed by `<!-- NAME.ours -->`, with peer, ratio or the key of a value, of the processor
that measured last; one with " %" behind it is written in percent.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

FIELDS: Final = ("ours", "peer", "ratio")
LOAD_MAX: Final = 0.5
USUAL: Final = "AMD EPYC (family 25 model 1), 2 cores"
"""The processor of most figures, which the page names once."""
UNITS: Final = ("ms", "us", "tokens/s", "requests/s", "ms of CPU", "us of CPU", "documents/s", "s")
"""Written behind a number."""
MARKED: Final = re.compile(r"(-?\d[\d,]*(?:\.\d+)?)([^\d<|]*)<!-- (\w+)\.(\w+) -->")
COMMENT: Final = re.compile(r"<!-- (\w+) -->")
NAME: Final = re.compile(r"`(\w+)`")

Line = Mapping[str, Any]
Results = Mapping[str, Sequence[Line]]
"""The lines of each figure, one a processor."""


class PageError(ValueError):
    """A page names what bench/results does not hold."""


def load_results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines of all files by figure.

    Raises:
        PageError: two lines have the same figure and processor.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in read_lines(path):
            lines = found.setdefault(line["figure"], [])
            if processor(line) in map(processor, lines):
                raise PageError(f"{path.name}: {line['figure']} is there twice")
            lines.append(line)
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The figures of one file; other lines, such as engine_cost, are left out."""
    if not path.exists():
        return []
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines() if text]
    return [line for line in lines if "ours" in line]


def processor(line: Line) -> str:
    """Processor and number of cores."""
    return str(line["machine"].rpartition(", Python")[0])


def render(page: str, results: Results) -> str:
    """The page with the numbers of ``results``.

    Raises:
        PageError: a figure or a value of it is missing; with the line's number.
    """
    columns, done = list[str](), []
    for number, text in enumerate(page.split("\n"), start=1):
        cells = text.split("|")
        columns = _columns(cells, columns)
        try:
            if columns and not _is_header(cells) and NAME.search(cells[1]):
                text = "|".join(_row(cells, columns, results))
            done.append(MARKED.sub(partial(_marked, results), text))
        except PageError as error:
            raise PageError(f"line {number}: {error}") from error
    return "\n".join(done)


def figures_of(page: str) -> Iterator[str]:
    """The names of all figures in tables and text."""
    columns = list[str]()
    for text in page.split("\n"):
        cells = text.split("|")
        columns = _columns(cells, columns)
        if columns and not _is_header(cells) and NAME.search(cells[1]):
            yield _name(cells, columns)
        yield from (found[3] for found in MARKED.finditer(text))


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
    """Where, unless on the usual processor, and when; other programs that wanted the cores are a limit."""
    load = line.get("load", 0.0)
    busy = f"load {load:.1f}" if load > LOAD_MAX else ""
    limits = [line.get("label"), line.get("limits"), busy]
    where = [] if processor(line) == USUAL else [processor(line)]
    return ", ".join([*where, line["commit"], *(limit for limit in limits if limit)])


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


def _name(cells: list[str], columns: list[str]) -> str:
    named = NAME.search(cells[1])
    if named is None or len(cells) != len(columns):
        raise PageError("a row of a table of figures has a cell for each column")
    return named[1]


def _row(cells: list[str], columns: list[str], results: Results) -> Iterator[str]:
    lines = results.get(_name(cells, columns), ())
    for key, cell in zip(columns, cells, strict=True):
        if key == "measured":
            yield f" {'<br>'.join(map(measured, lines)) or 'not measured'} "
        elif key in FIELDS or any(key in line.get("also", {}) for line in lines):
            yield f" {'<br>'.join(_cell(line, key) for line in lines)} ".replace("  ", " ")
        else:
            yield cell


def _cell(line: Line, key: str) -> str:
    value = _value(line, key)
    if value is None:
        return "-"
    if key == "ratio":
        low, high = line.get("low"), line.get("high")
        return shown(value) + (f" ({shown(low)} to {shown(high)})" if low is not None else "")
    if line["unit"].startswith(("share", "of ")):
        return f"{100 * value:.1f} %"
    return (
        f"{shown(value)} {line['unit'] if key in FIELDS and line['unit'] in UNITS else ''}".rstrip()
    )


def _value(line: Line, key: str) -> float | None:
    value: float | None = line[key] if key in FIELDS else line.get("also", {}).get(key)
    return value


def _marked(results: Results, found: re.Match[str]) -> str:
    if found[3] not in results:
        raise PageError(f"bench/results has no figure {found[3]}")
    line = results[found[3]][-1]
    value = _value(line, found[4])
    if value is None:
        raise PageError(f"{found[3]} has no {found[4]}")
    percent = found[2].startswith(" %") and not line["unit"].startswith("%")
    text = f"{100 * value:.1f}" if percent else shown(value)
    return f"{text}{found[2]}<!-- {found[3]}.{found[4]} -->"
