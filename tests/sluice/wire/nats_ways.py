"""The ways in which a client of NATS may try to reach a subject or a stream that is not its own."""

import asyncio
import base64
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice, product
from typing import Any, Final

from nats.aio.client import Client
from nats.aio.msg import Msg

from sluice.wire.connection import settle
from sluice.wire.permissions import inbox

BOUND_S: Final = 60.0
THIEF: Final = "THIEF"
"""A stream, and a consumer, that nobody has."""
_MIRROR: Final = {"name": "{stream}", "opt_start_seq": 1}
_EXTERNAL: Final = {**_MIRROR, "external": {"api": "sluice.api", "deliver": "{target}"}}
_PUSH: Final = {"deliver_subject": "{target}", "ack_policy": "none", "deliver_policy": "all"}
_PUSHED: Final = {"stream_name": "{stream}", "config": _PUSH}
_DURABLE: Final = {
    "stream_name": "{stream}",
    "config": {**_PUSH, "durable_name": THIEF, "headers_only": True},
}

API: Final[Sequence[tuple[str, object]]] = (
    ("INFO", ""),
    ("STREAM.NAMES", ""),
    ("STREAM.LIST", ""),
    ("STREAM.INFO.{stream}", ""),
    ("STREAM.INFO.{stream}", {"subjects_filter": ">"}),
    ("STREAM.MSG.GET.{stream}", {"seq": 1}),
    ("DIRECT.GET.{stream}", {"seq": 1}),
    ("DIRECT.GET.{stream}", {"seq": 1, "batch": 10}),
    ("DIRECT.GET.{stream}.{subject}", ""),
    ("CONSUMER.NAMES.{stream}", ""),
    ("CONSUMER.LIST.{stream}", ""),
    ("CONSUMER.INFO.{stream}.{consumer}", ""),
    ("CONSUMER.MSG.NEXT.{stream}.{consumer}", {"batch": 5, "no_wait": True}),
    ("CONSUMER.CREATE.{stream}", _PUSHED),
    (f"CONSUMER.CREATE.{{stream}}.{THIEF}", _PUSHED),
    (f"CONSUMER.CREATE.{{stream}}.{THIEF}.{{subject}}", _PUSHED),
    (f"CONSUMER.DURABLE.CREATE.{{stream}}.{THIEF}", _DURABLE),
    (f"CONSUMER.MSG.NEXT.{{stream}}.{THIEF}", {"batch": 5, "no_wait": True}),
    (f"CONSUMER.RESET.{{stream}}.{THIEF}", ""),
    (f"CONSUMER.PAUSE.{{stream}}.{THIEF}", {"pause_until": "2100-01-01T00:00:00Z"}),
    (f"CONSUMER.UNPIN.{{stream}}.{THIEF}", {"group": "g"}),
    ("CONSUMER.PAUSE.{stream}.{consumer}", {"pause_until": "2100-01-01T00:00:00Z"}),
    ("CONSUMER.RESET.{stream}.{consumer}", {"seq": 1}),
    ("CONSUMER.UNPIN.{stream}.{consumer}", {"group": "g"}),
    ("CONSUMER.LEADER.STEPDOWN.{stream}.{consumer}", ""),
    ("CONSUMER.PEER.REMOVE.{stream}.{consumer}", {"peer": "p"}),
    ("CONSUMER.PEER.EVACUATE.{stream}.{consumer}", {"peer": "p"}),
    (f"STREAM.CREATE.{THIEF}", {"name": THIEF, "subjects": ["{target}"]}),
    (f"STREAM.CREATE.{THIEF}", {"name": THIEF, "mirror": _MIRROR}),
    (f"STREAM.CREATE.{THIEF}", {"name": THIEF, "mirror": _EXTERNAL}),
    (f"STREAM.CREATE.{THIEF}", {"name": THIEF, "sources": [_MIRROR]}),
    (f"STREAM.CREATE.{THIEF}", {"name": THIEF, "sources": [_EXTERNAL]}),
    (
        f"STREAM.CREATE.{THIEF}",
        {
            "name": THIEF,
            "sources": [{**_MIRROR, "subject_transforms": [{"src": ">", "dest": "{target}"}]}],
        },
    ),
    (f"STREAM.INFO.{THIEF}", ""),
    (f"STREAM.MSG.GET.{THIEF}", {"seq": 1}),
    (f"STREAM.DELETE.{THIEF}", ""),
    (
        f"STREAM.CREATE.{THIEF}",
        {"name": THIEF, "subjects": ["t.x"], "republish": {"src": ">", "dest": "{target}"}},
    ),
    (
        f"STREAM.UPDATE.{THIEF}",
        {
            "name": THIEF,
            "subjects": ["t.x"],
            "allow_msg_schedules": True,
            "subject_transform": {"src": "t.x", "dest": "{target}"},
        },
    ),
    (f"STREAM.SNAPSHOT.{THIEF}", {"deliver_subject": "{target}"}),
    (f"STREAM.DELETE.{THIEF}", ""),
    ("STREAM.SNAPSHOT.{stream}", {"deliver_subject": "{target}"}),
    ("STREAM.RESTORE.{stream}", {"config": {"name": "{stream}"}, "state": {}}),
    ("STREAM.CREATE.{stream}", {"name": "{stream}", "subjects": ["{target}"]}),
    (
        "STREAM.UPDATE.{stream}",
        {
            "name": "{stream}",
            "subjects": ["{subject}"],
            "republish": {"src": ">", "dest": "t.{target}"},
        },
    ),
    ("STREAM.LEADER.STEPDOWN.{stream}", ""),
    ("STREAM.PEER.REMOVE.{stream}", {"peer": "p"}),
    ("STREAM.PEER.EVACUATE.{stream}", {"peer": "p"}),
    ("STREAM.CANCEL_MOVE.{stream}", ""),
    ("ACCOUNT.STREAM.MOVE.{account}.{stream}", {"server": "s"}),
    ("ACCOUNT.STREAM.CANCEL_MOVE.{account}.{stream}", ""),
    ("META.LEADER.STEPDOWN", ""),
    ("META.RESCUE", ""),
    ("SERVER.REMOVE", {"peer": "p"}),
    ("SERVER.EVACUATE", {"peer": "p"}),
)
"""Requests of JetStream's API, without what they delete. A test compares them with those of the server."""

DELETING: Final[Sequence[tuple[str, object]]] = (
    ("STREAM.MSG.DELETE.{stream}", {"seq": 1}),
    ("CONSUMER.DELETE.{stream}.{consumer}", ""),
    ("STREAM.PURGE.{stream}", ""),
    ("STREAM.DELETE.{stream}", ""),
    ("ACCOUNT.PURGE.{account}", ""),
)

PREFIXES: Final = ("$JS.API", "sluice.api", "$JS.hub.API")
"""JetStream's own, what questions that cross accounts are called on their way, and that of a domain."""

SYSTEM: Final = (
    *(f"$SYS.REQ.SERVER.PING{what}" for what in ("", ".VARZ", ".CONNZ", ".SUBSZ", ".JSZ")),
    *(f"$SYS.REQ.SERVER.PING.{what}" for what in ("ROUTEZ", "ACCOUNTZ", "HEALTHZ", "EXPVARZ")),
    *(f"$SYS.REQ.ACCOUNT.PING.{what}" for what in ("CONNZ", "STATZ", "SUBSZ", "INFO")),
    *(f"$SYS.REQ.ACCOUNT.gateways.{what}" for what in ("CONNZ", "JSZ", "INFO", "SUBSZ", "CONNS")),
    *(f"$SYS.REQ.CLAIMS.{what}" for what in ("LIST", "PACK", "UPDATE", "DELETE")),
    "$SYS.REQ.SERVER.{server}.RELOAD",
    "$SYS.REQ.SERVER.{server}.KICK",
    "$SYS.REQ.SERVER.{server}.LDMR",
    "$SYS.REQ.USER.INFO",
    "$SYS.REQ.ACCOUNT.NSUBS",
    "$SYS.DEBUG.SUBSCRIBERS",
    "$SYS.ACCOUNT.gateways.CONNECT",
)

HEADERS: Final = (
    {},
    {"Nats-Trace-Dest": "{target}"},
    {"Nats-Rollup": "all"},
    {"Nats-Rollup": "sub"},
    {"Nats-Schedule": "@at 2020-01-01T00:00:00Z", "Nats-Schedule-Target": "{target}"},
    {"Nats-Stream": "SLUICE_RECORDS", "Nats-Subject": "{target}"},
)
"""Of a message, with which a server does more than it was allowed to."""


def secret_of(stream: str) -> bytes:
    """What is in a stream."""
    return f"kept in {stream} alone".encode()


async def hear(client: Client, patterns: Iterable[str] = (">",)) -> list[tuple[str, Msg]]:
    """Messages that come from now on, with the pattern that they came by.

    What JetStream delivers to a subject has the one that it was stored with.
    """
    found: list[tuple[str, Msg]] = []
    for pattern in patterns:

        async def take(message: Msg, pattern: str = pattern) -> None:
            found.append((pattern, message))

        # nats-py keeps no more of what nobody has taken yet.
        await client.subscribe(pattern, cb=take, pending_msgs_limit=-1, pending_bytes_limit=-1)
    await settle(client, BOUND_S)
    return found


async def try_all(
    client: Client,
    kind: str,
    process: str,
    streams: Iterable[tuple[str, str]],
    targets: Sequence[str],
    barrier: Client,
    rows: Sequence[tuple[str, object]],
    *,
    every: bool = False,
) -> None:
    """Try each of ``rows`` with every stream and every reply subject.

    Args:
        streams: with a subject of each.
        barrier: whose question to JetStream is answered behind all of them.
        every: each stream with each reply subject, instead of those of `_pairs`.
    """
    own, known = f"{inbox(kind, process)}.reply", list(streams)
    for number, (template, body) in enumerate(rows):
        all_pairs = product(known, (own, *targets))
        for (stream, subject), reply in all_pairs if every else _pairs(known, own, targets, number):
            names = {
                "stream": stream,
                "subject": subject,
                "target": reply,
                "consumer": "batchers-m=t",
                "account": "gateways",
            }
            for prefix in PREFIXES:
                asked = f"{prefix}.{_filled(template, names)}"
                payload = body if isinstance(body, str) else json.dumps(body)
                await client.publish(asked, _filled(payload, names).encode(), reply)
        await _answered(client, barrier)


def _pairs(
    streams: Sequence[tuple[str, str]], own: str, targets: Sequence[str], number: int
) -> Iterator[tuple[tuple[str, str], str]]:
    """Streams with reply subjects: each stream with the own one, and each target with a stream.

    A server decides about the request by its subject, and about what it delivers by the target, so not every pair is
    tried. Each row of requests, by its number, has other ones.
    """
    yield from product(streams, (own,))
    yield from zip(islice(cycle(streams), number, None), targets, strict=False)


async def publish_all(client: Client, targets: Sequence[str], barrier: Client) -> None:
    """Publishes on each target, with each as the reply subject and with each header."""
    for target in targets:
        for reply in ("", *targets):
            await client.publish(target, b"forged", reply)
        for headers in HEADERS:
            made = {name: _filled(value, {"target": target}) for name, value in headers.items()}
            for subject in targets:
                await client.publish(subject, b"forged", headers=made or None)
        await _answered(client, barrier)


async def ask_system(client: Client, server: str, reply: str) -> None:
    """Asks the server itself."""
    for subject in SYSTEM:
        await client.publish(_filled(subject, {"server": server}), b"{}", reply)
    await settle(client, BOUND_S)


def found_in(messages: Iterable[tuple[str, Msg]], streams: Iterable[str]) -> set[str]:
    """The streams whose contents the messages have."""
    texts = b"\n".join(message.data for _, message in messages)
    return {
        stream
        for stream in streams
        if secret_of(stream) in texts or base64.b64encode(secret_of(stream)) in texts
    }


def _filled(text: str, names: dict[str, Any]) -> str:
    for name, value in names.items():
        text = text.replace(f"{{{name}}}", value)
    return text


async def _answered(client: Client, barrier: Client) -> None:
    await settle(client, BOUND_S)
    async with asyncio.timeout(BOUND_S):
        await barrier.jetstream(timeout=BOUND_S).account_info()
    await settle(client, BOUND_S)
