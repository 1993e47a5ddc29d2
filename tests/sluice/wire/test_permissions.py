"""What NATS lets each process do, with a real server and the credentials of each."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from sluice.tls import AUTHORITIES
from sluice.wire import subjects
from sluice.wire.connection import NatsUnreachable, settle
from sluice.wire.permissions import BATCHER, GATEWAY, JOBS, OPERATOR, inbox, permissions
from supervisor.certificates import Authority
from tests.support.certificates import connected, secured_nats

BOUND_S = 60.0
USERS = {
    "g1": (GATEWAY, "g1"),
    "g2": (GATEWAY, "g2"),
    "b1": (BATCHER, "b1"),
    "b2": (BATCHER, "b2"),
    "j1": (JOBS, "j1"),
}
EVERYTHING = {
    "tasks": "sluice.tasks.m.bulk.t",
    "what waits": "sluice.waiting.m.t",
    "dead letters": "sluice.dead_letters.m.bulk",
    "records": "sluice.records.r.request",
    "audit": "sluice.audit.t.r",
    "outcomes": "sluice.outcomes.t.r.outcome",
    "events": "sluice.events.router_drift",
    "keys": "$KV.SLUICE_KEYS.k",
    "secrets": "$KV.SLUICE_SECRETS.resume_key",
    "jobs": "$KV.SLUICE_JOBS.j",
    "job inputs": "sluice.job_inputs.u.1",
    "job results": "sluice.job_results.j.1.1",
    "all batchers": "sluice.control",
    "all gateways": "sluice.gateways",
    "question for metrics": "sluice.metrics",
    "drains": "$KV.SLUICE_DRAINS.workers",
    "API keys": "$KV.SLUICE_API_KEYS.k",
    "kept answers": "$KV.SLUICE_ANSWERS.a",
    **{f"metrics for {g}": f"sluice.metrics.{g}.q" for g in ("g1", "g2")},
    **{
        f"{one} of {b}": f"sluice.batchers.{b}.{one}"
        for one in ("task", "control")
        for b in ("b1", "b2")
    },
    **{f"report of {b}": f"sluice.reports.{b}" for b in ("b1", "b2")},
    **{f"frames of {g}": f"sluice.frames.{g}" for g in ("g1", "g2")},
    **{f"question to {g}": f"sluice.gateways.{g}" for g in ("g1", "g2")},
    **{f"inbox of {p}": f"{inbox(kind, p)}.x" for p, (kind, _) in USERS.items()},
    **{f"absence at {p}": f"sluice.absent.{p}.x" for p, (kind, _) in USERS.items() if kind != JOBS},
    **{
        f"{right} {stream}": f"$JS.API.{right}.{stream}"
        for right in ("STREAM.UPDATE", "STREAM.DELETE", "STREAM.MSG.GET", "CONSUMER.CREATE")
        for stream in (
            "SLUICE_TASKS",
            "SLUICE_RECORDS",
            "KV_SLUICE_SECRETS",
            "KV_SLUICE_JOBS",
            "OWN",
        )
    },
}
WIDE = (">", "sluice.>", "sluice.frames.*", "_INBOX.>", "$JS.ACK.>")
MAY_READ = {
    "g1": {"all gateways", "question to g1", "frames of g1", "absence at g1", "inbox of g1"}
    | {"report of b1", "report of b2", "question for metrics", "metrics for g1"},
    "b1": {
        "task of b1",
        "control of b1",
        "all batchers",
        "what waits",
        "absence at b1",
        "inbox of b1",
    }
    | {"report of b1", "report of b2", "question for metrics"},
    "j1": {"jobs", "inbox of j1", "question for metrics"},
}
MAY_WRITE = {
    "g1": {"tasks", "dead letters", "records", "audit", "outcomes", "events", "keys", "secrets"}
    | {"task of b1", "task of b2", "control of b1", "control of b2", "all batchers"}
    | {"all gateways", "question to g1", "question to g2", "inbox of g1", "inbox of g2"}
    | {
        "what waits",
        "question for metrics",
        "metrics for g1",
        "metrics for g2",
        "drains",
        "kept answers",
    }
    | {f"STREAM.UPDATE {s}" for s in ("SLUICE_TASKS", "SLUICE_RECORDS", "KV_SLUICE_SECRETS")}
    | {
        f"{right} {stream}"
        for right in ("STREAM.MSG.GET", "CONSUMER.CREATE")
        for stream in ("SLUICE_RECORDS", "KV_SLUICE_SECRETS")
    },
    "b1": {"frames of g1", "frames of g2", "report of b1", "dead letters"}
    | {"metrics for g1", "metrics for g2"},
    "j1": {"jobs", "job inputs", "job results"}
    | {"metrics for g1", "metrics for g2"}
    | {f"{right} KV_SLUICE_JOBS" for right in ("STREAM.MSG.GET", "CONSUMER.CREATE")},
}


def test_every_stream_belongs_to_a_process() -> None:
    streams = {
        value for name, value in vars(subjects).items() if name.endswith(("_STREAM", "_BUCKET"))
    }
    allowed = {one for kind in (GATEWAY, BATCHER, JOBS) for one in permissions(kind, "p").publish}
    assert {
        stream for stream in streams if f"$JS.API.STREAM.CREATE.{stream}" not in allowed
    } == set()


def test_jobs_read_the_streams_that_the_operator_lists_and_no_others() -> None:
    right = "$JS.API.STREAM.MSG.GET.PROMPTS"
    assert right in permissions(JOBS, "j1", ["PROMPTS"]).publish
    assert right not in permissions(JOBS, "j1").publish
    assert right not in permissions(BATCHER, "b1", ["PROMPTS"]).publish


@dataclass
class Mesh:
    """Connections by process, and what the server has said to each."""

    url: str
    clients: dict[str, Client]
    errors: dict[str, list[str]] = field(default_factory=dict)

    def __getitem__(self, process: str) -> Client:
        return self.clients[process]


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with secured_nats(tmp_path, USERS) as (url, authority), AsyncExitStack() as stack:
        clients = {}
        for process, (kind, _) in {**USERS, OPERATOR: (OPERATOR, OPERATOR)}.items():
            opened = connected(url, authority, kind, process)
            clients[process] = await stack.enter_async_context(opened)
        yield Mesh(url, clients)


def denials(client: Client) -> list[str]:
    """Collects what the server refuses from now on."""
    said: list[str] = []

    async def on_error(error: Exception) -> None:
        said.append(str(error).lower())

    client._error_cb = on_error  # type: ignore[method-assign]
    return said


def allowed(said: list[str]) -> set[str]:
    """What of `EVERYTHING` the server has not refused, by its messages."""
    return {name for name, subject in EVERYTHING.items() if not refused(subject, said)}


def refused(subject: str, said: list[str]) -> bool:
    return any(f'"{subject.lower()}"' in line for line in said)


@pytest.mark.parametrize("process", ["g1", "b1", "j1"])
async def test_a_process_reads_what_is_its_own_and_nothing_else(mesh: Mesh, process: str) -> None:
    client, said = mesh[process], denials(mesh[process])
    for subject in (*EVERYTHING.values(), *WIDE):
        await client.subscribe(subject)
    await settle(client, BOUND_S)
    assert allowed(said) == MAY_READ[process]
    assert all(refused(subject, said) for subject in WIDE)


@pytest.mark.parametrize("process", ["g1", "b1", "j1"])
async def test_a_process_writes_what_is_its_own_and_nothing_else(mesh: Mesh, process: str) -> None:
    client, said = mesh[process], denials(mesh[process])
    heard: set[str] = set()

    async def on_message(message: Msg) -> None:
        heard.add(message.subject)

    await mesh[OPERATOR].subscribe(">", cb=on_message)
    await settle(mesh[OPERATOR], BOUND_S)
    for subject in EVERYTHING.values():
        await client.publish(subject, b"forged")
    await settle(client, BOUND_S)
    await settle(mesh[OPERATOR], BOUND_S)
    assert allowed(said) == MAY_WRITE[process]
    assert heard & set(EVERYTHING.values()) == {EVERYTHING[name] for name in MAY_WRITE[process]}


async def test_an_unknown_process_is_refused_by_the_name_of_its_file(tmp_path: Path) -> None:
    async with secured_nats(tmp_path, USERS) as (url, authority):
        authority.issue("stranger")
        with pytest.raises(NatsUnreachable, match=r"refuses the certificate .*/stranger/tls.crt"):
            async with connected(url, authority, BATCHER, "stranger"):
                pass


async def test_certificates_of_another_authority_are_refused_on_both_sides(tmp_path: Path) -> None:
    async with secured_nats(tmp_path, USERS) as (url, authority):
        strange = Authority(tmp_path / "strange")
        strange.ensure(["b1"])
        with pytest.raises(NatsUnreachable, match=r"is not trusted by .*/strange/b1/ca.crt"):
            async with connected(url, strange, BATCHER, "b1"):
                pass
        (strange.of("b1") / AUTHORITIES).write_bytes(authority.ca.read_bytes())
        with pytest.raises(NatsUnreachable, match=r"refuses the certificate .*/b1/tls.crt"):
            async with connected(url, strange, BATCHER, "b1"):
                pass


async def test_a_server_without_tls_gets_nothing(nats_url: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.ensure(["b1"])
    with pytest.raises(NatsUnreachable, match="offers no TLS"):
        async with connected(nats_url, authority, BATCHER, "b1"):
            pass
