"""What each process may do on NATS: the accounts of nats-server, and what crosses between them.

NATS checks where a process publishes, not where JetStream publishes for it: whoever may ask JetStream names the subject
of the answer, and whoever may create a consumer names that of its messages. So permissions alone keep nobody from a
subject of the same account. Accounts do: what JetStream answers across them comes to the account that asked.

| account | who | JetStream |
|---|---|---|
| `gateways` | gateways and the operator | all streams but those of `jobs` |
| `jobs` | the processes of `jobs` | records, inputs and results of jobs |
| `batcher-ID` | one batcher; with a shared credential `batchers` | none |

Batchers and `jobs` may do all in their account, and reach of others what `Crossing` lists. Nobody but gateways may
create a consumer or a stream where others keep something. The lists of gateways guard against mistakes: with the rights
that they need, JetStream writes them any subject of their account.

Frames and answers about metrics come to gateways with the account that sent them at the end of their subject.

Accounts have limits of connections, subscriptions and payload: nats-server closes a connection that exceeds one.

A credential belongs to a process of one kind with one id; with the id "*" it is shared by all of a kind, which NATS
then does not tell apart.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sluice.wire import subjects
from sluice.wire.codec import MAX_MESSAGE_BYTES

GATEWAY: Final = "gateway"
BATCHER: Final = "batcher"
JOBS: Final = "jobs"
OPERATOR: Final = "operator"
"""`sluice up`, `status` and `record`: everything."""

_API: Final = "$JS.API"
GATEWAYS: Final = "gateways"
"""The account of gateways and of the operator."""
_MAPPED: Final = "sluice.api"
"""What questions to JetStream that cross accounts are called on their way: at their own name an account's own
JetStream would answer too, or say that there is none."""

OWN_CONNECTIONS: Final = 8
"""Connections of the account of one batcher, which has one, and another while it starts again."""
SHARED_CONNECTIONS: Final = 1024
"""Connections of an account of many processes."""
SUBSCRIPTIONS: Final = 1024
"""Subscriptions of one connection. A process has some dozens; each takes nats-server some 600 bytes."""

Users = Mapping[str, tuple[str, str]]
"""By process, its kind and the id that its rights are for."""


@dataclass(frozen=True)
class Permissions:
    """Patterns of subjects."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


@dataclass(frozen=True)
class Crossing:
    """What crosses between the account of a process and that of gateways, as patterns of subjects.

    Attributes:
        hears: messages of gateways that it may subscribe to.
        says: messages of it that gateways may subscribe to. No stream may take them: it would answer where they ask.
        asks: services of the account of gateways; answers come to its own account, whatever reply subject it names.
    """

    hears: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()


def identity(process: str) -> str:
    """Return the URI in a process's certificate, which is its user name in NATS."""
    return f"spiffe://sluice/{process}"


def inbox(kind: str, process: str) -> str:
    """Prefix of the subjects that answers come to."""
    return f"_INBOX.{kind}.{process}"


def account(kind: str, process: str) -> str:
    """Return the account that a process is in."""
    if kind == BATCHER:
        return "batchers" if process == subjects.ANY else f"{BATCHER}-{process}"
    return JOBS if kind == JOBS else GATEWAYS


def crossing(kind: str, process: str, input_streams: Iterable[str] = ()) -> Crossing:
    """Return what the process reaches of another account.

    `input_streams`: the operator's own, whose messages `jobs` may read.
    """
    if kind == BATCHER:
        return Crossing(
            hears=(
                f"{subjects.BATCHERS}.{process}.*",
                subjects.CONTROL,
                subjects.METRICS,
                subjects.RELOAD,
            ),
            says=(
                subjects.ALL_FRAMES,
                f"{subjects.REPORTS}.{process}",
                _ANSWERS_METRICS,
                f"{subjects.RELOADED}.*",
            ),
        )
    if kind == JOBS:
        return Crossing(
            hears=(subjects.METRICS,),
            says=(_ANSWERS_METRICS,),
            asks=tuple(f"{_API}.STREAM.MSG.GET.{stream}" for stream in input_streams),
        )
    return Crossing()


def accounts(users: Users, input_streams: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """Return the accounts of nats-server's configuration by name, without their users."""
    streams = tuple(input_streams)
    crossings = {
        account(kind, process): crossing(kind, process, streams) for kind, process in users.values()
    }
    sections: dict[str, dict[str, Any]] = defaultdict(lambda: {"exports": [], "imports": []})
    gateways = sections[GATEWAYS]
    for name, reached in crossings.items():
        mine = sections[name]
        for subject in reached.hears:
            _export(gateways, {"stream": subject})
            mine["imports"].append(_imported("stream", GATEWAYS, subject))
        for subject in reached.says:
            _export(mine, {"stream": subject})
            gateways["imports"].append(_heard(name, subject))
        for subject in reached.asks:
            _export(gateways, {"service": subject})
            mine["imports"].append(_question(mine, subject))
    for name, section in sections.items():
        own = name.startswith(f"{BATCHER}-")
        section["limits"] = {
            "max_connections": OWN_CONNECTIONS if own else SHARED_CONNECTIONS,
            "max_subscriptions": SUBSCRIPTIONS,
            "max_payload": MAX_MESSAGE_BYTES,
        }
        if name in (GATEWAYS, JOBS):
            section["jetstream"] = "enabled"
    return dict(sections)


def _export(account_: dict[str, Any], export: dict[str, str]) -> None:
    if export not in account_["exports"]:
        account_["exports"].append(export)


def _imported(what: str, of: str, subject: str) -> dict[str, Any]:
    return {what: {"account": of, "subject": subject}}


def _heard(speaker: str, subject: str) -> dict[str, Any]:
    """Return the import of what the account `speaker` says, which names it at the end of what many may say."""
    imported = _imported("stream", speaker, subject)
    if named := _NAMING.get(subject):
        imported["to"] = f"{named}.{speaker}"
    return imported


def may_speak_as(speaker: str, kind: str, process: str) -> bool:
    """Return whether the account `speaker` is that of the process of `kind` with the id `process`.

    Args:
        kind: Kind of the process, such as `BATCHER`.
        process: Id of the process.
        speaker: The end of the subject of its message; empty: it is of the account of gateways, or there are no
            accounts.
    """
    return not speaker or speaker in (account(kind, process), account(kind, subjects.ANY))


def _question(asking: dict[str, Any], subject: str) -> dict[str, Any]:
    """Return the import of a service."""
    on_its_way = _MAPPED + subject.removeprefix(_API)
    asking.setdefault("mappings", {})[subject] = on_its_way
    return {**_imported("service", GATEWAYS, subject), "to": on_its_way}


def permissions(kind: str, process: str) -> Permissions | None:
    """Return what the process of `kind` with the id `process` may do in its account; None: everything."""
    if kind != GATEWAY:
        return None
    owned = (
        subjects.RECORDS_STREAM,
        subjects.OUTCOMES_STREAM,
        subjects.DEAD_LETTERS_STREAM,
        subjects.AUDIT_STREAM,
        # For operators: `sluice keys`, and the data of a tenant that is deleted.
        subjects.API_KEYS_BUCKET,
        *subjects.GATEWAY_BUCKETS,
    )
    publish = (
        f"{subjects.BATCHERS}.*.*",
        subjects.CONTROL,
        subjects.GATEWAYS,
        f"{subjects.GATEWAYS}.*",
        f"{inbox(GATEWAY, '*')}.>",
        subjects.METRICS,
        _ANSWERS_METRICS,
        f"{subjects.RELOADED}.*",
        *(f"{prefix}.>" for prefix in _STORED_BY_GATEWAYS),
        *(f"{subjects.bucket_prefix(bucket)}>" for bucket in subjects.GATEWAY_BUCKETS),
        *_each(owned, _CREATE, _CHANGE, _READ, _REMOVE),
    )
    subscribe = (
        f"{inbox(GATEWAY, process)}.>",
        f"{subjects.FRAMES}.{process}",
        f"{subjects.FRAMES}.{process}.*",
        f"{subjects.ABSENT}.{process}.*",
        subjects.ALL_REPORTS,
        subjects.GATEWAYS,
        f"{subjects.GATEWAYS}.{process}",
        subjects.METRICS,
        f"{subjects.METRICS}.{process}.*",
        f"{subjects.METRICS}.{process}.*.*",
        subjects.RELOAD,
    )
    return Permissions(publish, subscribe)


KINDS: Final = (GATEWAY, BATCHER, JOBS, OPERATOR)

_ANSWERS_METRICS: Final = f"{subjects.METRICS}.*.*"
_NAMING: Final[Mapping[str, str]] = {
    subjects.ALL_FRAMES: f"{subjects.FRAMES}.$1",
    _ANSWERS_METRICS: f"{subjects.METRICS}.$1.$2",
}
"""What many may say, as gateways hear it; the account that says it follows."""
_STORED_BY_GATEWAYS: Final = (
    subjects.DEAD_LETTERS,
    subjects.RECORDS,
    subjects.AUDIT,
    subjects.OUTCOMES,
)


_CREATE: Final = ("STREAM.CREATE.{}",)
_CHANGE: Final = ("STREAM.UPDATE.{}",)
_REMOVE: Final = ("STREAM.PURGE.{}", "STREAM.MSG.DELETE.{}")
_READ: Final = (
    *("STREAM.INFO.{}", "STREAM.MSG.GET.{}", "DIRECT.GET.{}", "DIRECT.GET.{}.>"),
    *("CONSUMER.CREATE.{}.>", "CONSUMER.CREATE.{}", "CONSUMER.INFO.{}.*"),
    *("CONSUMER.MSG.NEXT.{}.*", "CONSUMER.DELETE.{}.*"),
)
"""Requests of the JetStream API, below `$JS.API`, that each right consists of; {} is the stream."""


def _each(streams: Iterable[str], *rights: Iterable[str]) -> list[str]:
    """Return the subjects of the JetStream API that grant `rights` on each of `streams`."""
    return [f"{_API}.{api.format(name)}" for name in streams for right in rights for api in right]
