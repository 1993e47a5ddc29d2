"""Options that several commands share, so that they read the same everywhere."""

from typing import Annotated

import typer

from sluice.client.channel import ADDRESS_VARIABLE
from sluice.client.request import GenerateOptions, PriorityName
from sluice.defaults import AUTO, DEFAULT_ADDRESS

Address = Annotated[
    str,
    typer.Option(envvar=ADDRESS_VARIABLE, metavar="HOST:PORT", help="Address of the gateway."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")
]
Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", metavar="NAME", help='A name out of `sluice models`, or "auto" to route.'
    ),
]
Priority = Annotated[
    PriorityName,
    typer.Option(help="Urgency class: who is served first when workers are busy."),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="Largest number of tokens of the answer.  [default: what fits]"),
]
Temperature = Annotated[
    float | None,
    typer.Option(help="0 takes the most probable token, up to 2 draws freely.  [default: 0]"),
]
TopP = Annotated[
    float | None,
    typer.Option(help="Draw from the smallest set of tokens with this probability.  [default: 1]"),
]
TopK = Annotated[
    int | None, typer.Option(help="Draw from this many tokens; 0 is no limit.  [default: 0]")
]
Seed = Annotated[
    int | None, typer.Option(help="Makes draws repeatable.  [default: the gateway picks one]")
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="A string that ends the answer; may be repeated."),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1 makes tokens that occurred less likely.  [default: 1]")
]
Logprobs = Annotated[
    int | None,
    typer.Option(help="Alternatives per token with their log-probabilities; needs --json."),
]
Label = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="For routing rules and accounting; may be repeated."),
]
Timeout = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Deadline of an answer.  [default: the gateway's]"),
]

ADDRESS = DEFAULT_ADDRESS
MODEL = AUTO


def labels_of(pairs: list[str] | None) -> dict[str, str]:
    """The labels in ``KEY=VALUE`` pairs."""
    labels = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--label")
        labels[key] = value
    return labels


def given(**options: object) -> GenerateOptions:
    """What of `options` was set (is not None), as the client takes it."""
    chosen: GenerateOptions = {}
    chosen.update((key, value) for key, value in options.items() if value is not None)  # type: ignore[typeddict-item]
    return chosen
