"""Options that several commands share, so that they read the same everywhere."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

from typer import BadParameter

from cli.commands import Group, option
from sluice.client import Client
from sluice.client.channel import ADDRESS_VARIABLE
from sluice.client.request import GenerateOptions, PriorityName, Tool
from sluice.defaults import AUTO, DEFAULT_ADDRESS
from sluice.errors import InvalidRequest

Address = Annotated[
    str,
    option(
        "Address of the gateway, or of several with commas between them.",
        envvar=ADDRESS_VARIABLE,
        metavar="HOST:PORT",
    ),
]
Model = Annotated[
    str,
    option('A name out of `sluice models`, or "auto" to route.', "--model", "-m", metavar="NAME"),
]
Priority = Annotated[
    PriorityName,
    option("Urgency class: who is served first when workers are busy."),
]
Temperature = Annotated[
    float | None,
    option("0 takes the most probable token, up to 2 draws freely.  [default: 0]"),
]
Label = Annotated[
    list[str] | None,
    option("For routing rules and accounting; may be repeated.", metavar="KEY=VALUE"),
]
Tenant = Annotated[
    str | None,
    option("Who asks and pays.  [default: default]", envvar="SLUICE_TENANT", metavar="NAME"),
]
StateDir = Annotated[
    Path | None,
    option("Logs, state and tasks of a mesh on this machine; default $SLUICE_STATE_DIR."),
]

ADDRESS = DEFAULT_ADDRESS
MODEL = AUTO


def labels_of(pairs: list[str] | None) -> dict[str, str]:
    """The labels in ``KEY=VALUE`` pairs."""
    labels = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--label")
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


def tools_of(given: Sequence[str] | None) -> list[Tool]:
    """The tools in each of ``given``: JSON, or the name of a file with it."""
    return [tool for one in given or () for tool in _tools_in(one)]


def _tools_in(given: str) -> list[Tool]:
    try:
        value = json.loads(_json_text(given, "--tool"))
        described = value if isinstance(value, list) else [value]
        return [Tool(**one.get("function", one)) for one in described]
    except (ValueError, TypeError, AttributeError) as error:
        raise BadParameter(
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
        raise BadParameter(f"{given}: {reason}", param_hint=option) from error


def _sampling(
    model: Model = MODEL,
    priority: Priority = "interactive",
    max_tokens: Annotated[
        int | None,
        option("Largest number of tokens of the answer.  [default: what fits]"),
    ] = None,
    temperature: Temperature = None,
    top_p: Annotated[
        float | None,
        option("Draw from the smallest set of tokens with this probability.  [default: 1]"),
    ] = None,
    top_k: Annotated[
        int | None, option("Draw from this many tokens; 0 is no limit.  [default: 0]")
    ] = None,
    min_p: Annotated[
        float | None,
        option(
            "Draw from the tokens at least this many times as probable as the first.  [default: 0]"
        ),
    ] = None,
    seed: Annotated[
        int | None, option("Makes draws repeatable.  [default: the gateway picks one]")
    ] = None,
    stop: Annotated[
        list[str] | None,
        option("A string that ends the answer; may be repeated.", metavar="TEXT"),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        option("Above 1 makes tokens that occurred less likely.  [default: 1]"),
    ] = None,
    presence_penalty: Annotated[
        float | None,
        option("Taken off the logits of tokens of the answer.  [default: 0]"),
    ] = None,
    frequency_penalty: Annotated[
        float | None,
        option("The same, times how often the token occurred.  [default: 0]"),
    ] = None,
    min_tokens: Annotated[
        int | None, option("The model cannot end its answer before.  [default: 0]")
    ] = None,
    json_schema: Annotated[
        str | None,
        option("A JSON schema: the answer is JSON that it accepts.", metavar="FILE|TEXT"),
    ] = None,
    regex: Annotated[
        str | None,
        option("A regular expression that the whole answer matches.", metavar="TEXT"),
    ] = None,
    label: Label = None,
    timeout: Annotated[
        float | None,
        option("Deadline of an answer.  [default: the gateway's]", metavar="SECONDS"),
    ] = None,
    allow_degraded: Annotated[
        bool,
        option(
            "A smaller model may answer when the chosen one could not before the deadline.",
        ),
    ] = False,
) -> GenerateOptions:
    """Those of the options that were set (are not None), as the client takes them."""
    given = {**locals(), "stop": stop or None, "labels": labels_of(label), "timeout_s": timeout}
    del given["label"], given["timeout"]
    if json_schema is not None:
        given["json_schema"] = _json_text(json_schema, "--json-schema")
    chosen = {key: value for key, value in given.items() if value is not None}
    return cast("GenerateOptions", chosen)


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
