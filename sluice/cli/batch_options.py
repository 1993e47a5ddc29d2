"""Options that the commands of `sluice batch` share."""

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write OpenAI's batch output here, in the order of the input."
    ),
]
InputTemplate = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help='Makes prompts out of columns: "Summarize: {text}".'),
]
IdField = Annotated[
    str, typer.Option(metavar="NAME", help='The column that names an item.  [default: "id"]')
]
