"""Options that several commands share, so that they read the same everywhere."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

from typer import BadParameter, Option

from cli.commands import Group
from cli.target import target_of
from sluice.client import Client
from sluice.client.channel import ADDRESS_VARIABLE
from sluice.client.request import GenerateOptions, PriorityName, Tool
from sluice.defaults import AUTO
from sluice.errors import InvalidRequest

Address = Annotated[
    str | None,
    Option(help="Gateway, or several with commas.", envvar=ADDRESS_VARIABLE, metavar="HOST:PORT"),
]
Model = Annotated[str, Option("--model", "-m", help='Model, or "auto" to route.', metavar="NAME")]
Priority = Annotated[PriorityName, Option(help="Class: who is served first.")]
Temperature = Annotated[float | None, Option(help="Sampling temperature, 0 to 2.  [default: 0]")]
Label = Annotated[
    list[str] | None, Option(help="For routing and accounting; repeatable.", metavar="KEY=VALUE")
]
Tenant = Annotated[
    str | None, Option(help="Tenant of the call.", envvar="SLUICE_TENANT", metavar="NAME")
]
AllowDegraded = Annotated[
    bool | None,
    Option("--allow-degraded/--no-allow-degraded", help="Whether a fallback may answer."),
]
StateDir = Annotated[
    Path | None, Option(help="State directory of a mesh.  [default: $SLUICE_STATE_DIR]")
]


def check_timeout(timeout: float | None) -> None:
    """Refuse a time in which no answer can come.

    Raises:
        BadParameter: it is not above 0.
    """
    if timeout is not None and not timeout > 0:
        raise BadParameter(f"{timeout:g} must be greater than 0", param_hint="--timeout")


def labels_of(pairs: list[str] | None) -> dict[str, str]:
    """Return the labels in `KEY=VALUE` pairs; raise BadParameter for another form."""
    labels = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--label")
        labels[key] = value
    return labels


def text_of(data: bytes, field: str) -> str:
    """Return `data` decoded as UTF-8.

    Raises:
        InvalidRequest: it is something else; `field` is what it was given for.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        byte, where = data[error.start], error.start
        raise InvalidRequest.of(
            field, f"is not valid UTF-8: byte 0x{byte:02x} at offset {where}"
        ) from error


def tools_of(arguments: Sequence[str] | None) -> list[Tool]:
    """Return the tools in each of `arguments`: JSON, or the name of a file with it; raise BadParameter for others."""
    return [tool for one in arguments or () for tool in _tools_in(one)]


def _tools_in(argument: str) -> list[Tool]:
    try:
        value = json.loads(_json_text(argument, "--tool"))
        described = value if isinstance(value, list) else [value]
        return [Tool(**one.get("function", one)) for one in described]
    except (ValueError, TypeError, AttributeError) as error:
        raise BadParameter(
            f"{argument}: is no tool, a JSON object with name, description, parameters: {error}",
            param_hint="--tool",
        ) from error


def _json_text(argument: str, option: str) -> str:
    """Return `argument` if it is JSON, else the content of the file of that name."""
    if argument.lstrip().startswith(("{", "[")):
        return argument
    try:
        return Path(argument).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise BadParameter(f"{argument}: {reason}", param_hint=option) from error


def _sampling(
    model: Model = AUTO,
    priority: Priority = "interactive",
    max_tokens: int | None = Option(
        None, help="Maximum tokens of the answer.  [default: what fits]"
    ),
    temperature: Temperature = None,
    top_p: float | None = Option(None, help="Nucleus sampling probability.  [default: 1]"),
    top_k: int | None = Option(None, help="Sample from this many tokens; 0: all.  [default: 0]"),
    min_p: float | None = Option(None, help="Minimum share of the top probability.  [default: 0]"),
    seed: int | None = Option(None, help="Random seed.  [default: the gateway picks one]"),
    stop: list[str] | None = Option(None, help="Stop string; may be repeated.", metavar="TEXT"),
    repetition_penalty: float | None = Option(None, help="Above 1: repeat less.  [default: 1]"),
    presence_penalty: float | None = Option(
        None, help="Penalty of tokens in the answer.  [default: 0]"
    ),
    frequency_penalty: float | None = Option(None, help="Penalty by frequency.  [default: 0]"),
    min_tokens: int | None = Option(None, help="Minimum tokens of the answer.  [default: 0]"),
    json_schema: str | None = Option(None, help="JSON schema of the answer.", metavar="FILE|TEXT"),
    regex: str | None = Option(None, help="Pattern of the whole answer.", metavar="TEXT"),
    label: Label = None,
    timeout: float | None = Option(None, help="Timeout of a request.", metavar="SECONDS"),
    allow_degraded: AllowDegraded = None,
) -> GenerateOptions:
    """Return the options that were set (are not None), as the client accepts them."""
    check_timeout(timeout)
    values = {**locals(), "stop": stop or None, "labels": labels_of(label), "timeout_s": timeout}
    del values["label"], values["timeout"]
    if json_schema is not None:
        values["json_schema"] = _json_text(json_schema, "--json-schema")
    chosen = {key: value for key, value in values.items() if value is not None}
    return cast("GenerateOptions", chosen)


def connect(tenant: Tenant = None, address: Address = None) -> Client:
    """Return a client of the gateway that `target_of` finds."""
    return Client(**target_of(address).options(tenant))


Sampling = Annotated[GenerateOptions, Group(_sampling)]
"""The options that were set."""
BulkSampling = Annotated[GenerateOptions, Group(_sampling, without=("priority", "allow_degraded"))]
"""The same without the class, which follows from the command."""
TenantClient = Annotated[Client, Group(connect)]
"""A client for calls of a tenant."""
OperatorClient = Annotated[Client, Group(connect, without=("tenant",))]
"""A client for questions about the mesh."""
