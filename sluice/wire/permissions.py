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
"""Commands such as `sluice up`, `status`, `record` and `keys`: everything in its account."""

_API: Final = "$JS.API"
GATEWAYS: Final = "gateways"
"""The account of gateways and of the operator."""
_MAPPED: Final = "sluice.api"
"""Prefix of requests to JetStream while they cross accounts. Below `$JS.API` the JetStream of the sender's own account
would answer too, or say that there is none."""

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
        subscribes: subjects of the gateways' account that it subscribes to.
        publishes: its subjects that gateways subscribe to. No stream may store them: it would answer the publisher.
        requests: services of the gateways' account; answers come to its own account, whatever reply subject it names.
    """

    subscribes: tuple[str, ...] = ()
    publishes: tuple[str, ...] = ()
    requests: tuple[str, ...] = ()


def identity(process: str) -> str:
    """Return the URI in a process's certificate, which is its user name in NATS."""
    return f"spiffe://sluice/{process}"


def inbox(kind: str, process: str) -> str:
    """Return the prefix of the subjects that answers come to."""
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
            subscribes=(
                f"{subjects.BATCHERS}.{process}.*",
                subjects.CONTROL,
                subjects.METRICS,
                subjects.RELOAD,
            ),
            publishes=(
                subjects.ALL_FRAMES,
                f"{subjects.REPORTS}.{process}",
                _ANSWERS_METRICS,
                f"{subjects.RELOADED}.*",
            ),
        )
    if kind == JOBS:
        return Crossing(
            subscribes=(subjects.METRICS,),
            publishes=(_ANSWERS_METRICS,),
            requests=tuple(f"{_API}.STREAM.MSG.GET.{stream}" for stream in input_streams),
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
        for subject in reached.subscribes:
            _export(gateways, {"stream": subject})
            mine["imports"].append(_imported("stream", GATEWAYS, subject))
        for subject in reached.publishes:
            _export(mine, {"stream": subject})
            gateways["imports"].append(_stream_import(name, subject))
        for subject in reached.requests:
            _export(gateways, {"service": subject})
            mine["imports"].append(_service_import(mine, subject))
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


def _stream_import(sender: str, subject: str) -> dict[str, Any]:
    """Return the import of a subject of the account `sender`; where many publish it, its name is added at the end."""
    imported = _imported("stream", sender, subject)
    if named := _NAMING.get(subject):
        imported["to"] = f"{named}.{sender}"
    return imported


def may_send_as(sender: str, kind: str, process: str) -> bool:
    """Return whether the account `sender` is that of the process of `kind` with the id `process`.

    Args:
        kind: Kind of the process, such as `BATCHER`.
        process: Id of the process.
        sender: The end of the subject of its message; empty: it is of the account of gateways, or there are no
            accounts.
    """
    return not sender or sender in (account(kind, process), account(kind, subjects.ANY))


def _service_import(importer: dict[str, Any], subject: str) -> dict[str, Any]:
    """Return the import of a service; add the mapping that it needs to `importer`."""
    on_its_way = _MAPPED + subject.removeprefix(_API)
    importer.setdefault("mappings", {})[subject] = on_its_way
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
        *_api_subjects(owned, _CREATE, _CHANGE, _READ, _REMOVE),
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
"""Subjects that many accounts publish, as gateways import them: the name of the account follows."""
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


def _api_subjects(streams: Iterable[str], *rights: Iterable[str]) -> list[str]:
    """Return the subjects of the JetStream API that grant `rights` on each of `streams`."""
    return [f"{_API}.{api.format(name)}" for name in streams for right in rights for api in right]
