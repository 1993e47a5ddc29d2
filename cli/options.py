"""Options that several commands share, so that they read the same everywhere."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

import typer

from cli.option_groups import Group
from sluice.client import Client
from sluice.client.channel import ADDRESS_VARIABLE
from sluice.client.request import GenerateOptions, PriorityName, Tool
from sluice.defaults import AUTO, DEFAULT_ADDRESS
from sluice.errors import InvalidRequest

Address = Annotated[
    str,
    typer.Option(
        envvar=ADDRESS_VARIABLE,
        metavar="HOST:PORT",
        help="Address of the gateway, or of several with commas between them.",
    ),
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
MinP = Annotated[
    float | None,
    typer.Option(
        help="Draw from the tokens at least this many times as probable as the first.  [default: 0]"
    ),
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Taken off the logits of tokens of the answer.  [default: 0]")
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(help="The same, times how often the token occurred.  [default: 0]"),
]
MinTokens = Annotated[
    int | None, typer.Option(help="The model cannot end its answer before.  [default: 0]")
]
JsonSchema = Annotated[
    str | None,
    typer.Option(metavar="FILE|TEXT", help="A JSON schema: the answer is JSON that it accepts."),
]
Regex = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="A regular expression that the whole answer matches."),
]
Logprobs = Annotated[
    int | None,
    typer.Option(help="Alternatives per token with their log-probabilities; needs --json."),
]
Count = Annotated[
    int,
    typer.Option("--n", min=1, max=16, help="So many answers; they differ above --temperature 0."),
]
ToolFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--tool",
        metavar="FILE|TEXT",
        help="A function that the model may call, as JSON: name, description, parameters; or a list of them, or "
        "OpenAI's form. May be repeated.",
    ),
]
ToolChoice = Annotated[
    str | None,
    typer.Option(metavar="none|auto|required|NAME", help="Whether, or which, tool is called."),
]
Label = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="For routing rules and accounting; may be repeated."),
]
Tenant = Annotated[
    str | None,
    typer.Option(
        envvar="SLUICE_TENANT", metavar="NAME", help="Who asks and pays.  [default: default]"
    ),
]
AllowDegraded = Annotated[
    bool,
    typer.Option(
        "--allow-degraded",
        help="A smaller model may answer when the chosen one could not before the deadline.",
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Deadline of an answer.  [default: the gateway's]"),
]

StateDir = Annotated[
    Path | None, typer.Option(help="As given to `sluice up`; default $SLUICE_STATE_DIR.")
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


def text_of(given: bytes, field: str) -> str:
    """``given`` as UTF-8.

    Raises:
        InvalidRequest: it is something else; ``field`` is what it was given for.
    """
    try:
        return given.decode()
    except UnicodeDecodeError as error:
        byte, where = given[error.start], error.start
        raise InvalidRequest.of(
            field, f"is not valid UTF-8: byte 0x{byte:02x} at offset {where}"
        ) from error


def schema_of(given: str | None) -> str | None:
    """The JSON schema in ``given``, or in the file of that name."""
    return None if given is None else _json_text(given, "--json-schema")


def tools_of(given: Sequence[str] | None) -> list[Tool]:
    """The tools in each of ``given``: JSON, or the name of a file with it."""
    return [tool for one in given or () for tool in _tools_in(one)]


def _tools_in(given: str) -> list[Tool]:
    try:
        value = json.loads(_json_text(given, "--tool"))
        described = value if isinstance(value, list) else [value]
        return [Tool(**one.get("function", one)) for one in described]
    except (ValueError, TypeError, AttributeError) as error:
        raise typer.BadParameter(
            f"{given}: is no tool, a JSON object with name, description, parameters: {error}",
            param_hint="--tool",
        ) from error


def _json_text(given: str, option: str) -> str:
    """``given`` where it is JSON, else what is in the file of that name."""
    if given.lstrip().startswith(("{", "[")):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise typer.BadParameter(f"{given}: {reason}", param_hint=option) from error


def _sampling(
    model: Model = MODEL,
    priority: Priority = "interactive",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    min_tokens: MinTokens = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    label: Label = None,
    timeout: Timeout = None,
    allow_degraded: AllowDegraded = False,
) -> GenerateOptions:
    """Those of the options that were set (are not None), as the client takes them."""
    given = {
        **locals(),
        "stop": stop or None,
        "json_schema": schema_of(json_schema),
        "labels": labels_of(label),
        "timeout_s": timeout,
    }
    del given["label"], given["timeout"]
    return cast(
        "GenerateOptions", {key: value for key, value in given.items() if value is not None}
    )


def _client(tenant: Tenant = None, address: Address = ADDRESS) -> Client:
    return Client(address, tenant=tenant)


Sampling = Annotated[GenerateOptions, Group(_sampling)]
"""The options that were set."""
BulkSampling = Annotated[GenerateOptions, Group(_sampling, without=("priority", "allow_degraded"))]
"""The same without the class, which follows from the command."""
TenantClient = Annotated[Client, Group(_client)]
"""A client for calls of a tenant."""
OperatorClient = Annotated[Client, Group(_client, without=("tenant",))]
"""A client for questions about the mesh."""
