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
Split = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="TOKENS",
        help="Long documents: parts of at most so many tokens.  [default: what fits]",
    ),
]
Overlap = Annotated[
    int,
    typer.Option(
        min=0, metavar="TOKENS", help="Of the end of a part that begin the next one; needs --split."
    ),
]
MapTemplate = Annotated[
    str,
    typer.Option("--map", metavar="TEXT", help='The prompt of a part: "Summarize: {text}".'),
]
ReduceTemplate = Annotated[
    str,
    typer.Option(
        "--reduce",
        metavar="TEXT",
        help='Split documents; the prompt of the answers to the parts: "Put together: {text}".',
    ),
]
Reuse = Annotated[
    list[str] | None,
    typer.Option(
        metavar="JOB", help="Take this job's answers to identical prompts; may be repeated."
    ),
]
IdField = Annotated[
    str, typer.Option(metavar="NAME", help='The column that names an item.  [default: "id"]')
]
Messages = Annotated[
    int,
    typer.Option(min=0, help="Of nats://SUBJECT: the input ends after so many.  [default: no end]"),
]
Idle = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="Of nats://SUBJECT: the input ends when none came for so long.  [default: no end]",
    ),
]
FromSequence = Annotated[
    int,
    typer.Option(
        min=0, help="Of nats://SUBJECT: of the first message in its stream.  [default: the first]"
    ),
]
