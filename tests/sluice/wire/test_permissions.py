"""What NATS lets each process reach, with a real server and the credentials of each."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import nats
import pytest
from nats.aio.client import Client
from nats.js.api import StreamConfig, StreamInfo

from sluice.settings import JobsSettings
from sluice.tls import AUTHORITIES, ClientContext
from sluice.wire import jetstream, subjects
from sluice.wire.codec import MAX_MESSAGE_BYTES
from sluice.wire.connection import NatsUnreachable, settle
from sluice.wire.permissions import (
    BATCHER,
    GATEWAY,
    GATEWAYS,
    JOBS,
    KINDS,
    OPERATOR,
    OWN_CONNECTIONS,
    SUBSCRIPTIONS,
    accounts,
    crossing,
    identity,
    inbox,
    may_send_as,
    permissions,
)
from supervisor.certificates import Authority
from supervisor.nats import find_nats_server
from tests.sluice.wire.nats_ways import (
    API,
    BOUND_S,
    DELETING,
    ask_system,
    found_in,
    hear,
    publish_all,
    secret_of,
    try_all,
)
from tests.support.certificates import connected, secured_nats
from tests.support.nats import running_nats

USERS = {
    "g1": (GATEWAY, "g1"),
    "g2": (GATEWAY, "g2"),
    "b1": (BATCHER, "b1"),
    "b2": (BATCHER, "b2"),
    "j1": (JOBS, "j1"),
}
PROMPTS: Final = "PROMPTS"
"""A stream of the operator that `jobs` may read."""
SUBJECTS: Final = (
    "sluice.tasks.m.bulk.t",
    "sluice.dead_letters.m.bulk",
    "sluice.records.r.request.t.a",
    "sluice.audit.t.r",
    "sluice.outcomes.t.r.outcome",
    *(f"{subjects.bucket_prefix(bucket)}k" for bucket in subjects.GATEWAY_BUCKETS),
    "$KV.SLUICE_API_KEYS.k",
    "$KV.SLUICE_JOBS.j",
    "sluice.job_inputs.u.1",
    "sluice.job_results.j.1.1",
    "prompts.p",
    "sluice.control",
    "sluice.gateways",
    "sluice.metrics",
    "sluice.reload",
    "sluice.reloaded.q",
    "$O.FILES.M.x",
    "$SYS.ACCOUNT.gateways.DISCONNECT",
    *(f"sluice.metrics.{g}.q" for g in ("g1", "g2")),
    *(f"sluice.batchers.{b}.{one}" for one in ("task", "control") for b in ("b1", "b2")),
    *(f"sluice.reports.{b}" for b in ("b1", "b2")),
    *(f"sluice.frames.{g}" for g in ("g1", "g2")),
    *(f"sluice.frames.{g}.batcher-{b}" for g in ("g1", "g2") for b in ("b1", "b2")),
    *(f"sluice.metrics.{g}.q.{a}" for g in ("g1", "g2") for a in ("batcher-b1", "jobs")),
    *(f"sluice.gateways.{g}" for g in ("g1", "g2")),
    *(f"{inbox(kind, p)}.x" for p, (kind, _) in USERS.items()),
    *(f"sluice.absent.{p}.x" for p, (kind, _) in USERS.items() if kind != JOBS),
)
HEARS = {
    "b1": {"sluice.batchers.b1.task", "sluice.batchers.b1.control", "sluice.control"}
    | {"sluice.metrics", "sluice.reload"},
    "j1": {"sluice.metrics"},
}
"""What it hears of the account of gateways."""
SAYS = {
    "b1": {"sluice.reports.b1", "sluice.reloaded.q"}
    | {f"sluice.frames.{g}.batcher-b1" for g in ("g1", "g2")}
    | {f"sluice.metrics.{g}.q.batcher-b1" for g in ("g1", "g2")},
    "j1": {"sluice.metrics.g1.q.jobs", "sluice.metrics.g2.q.jobs"},
}
"""What the account of gateways hears of it."""
READS = {
    "b1": set[str](),
    "j1": {PROMPTS},
}

OF_JOBS = (jetstream.JOBS, *jetstream.job_streams(JobsSettings()))
OF_GATEWAYS = (
    jetstream.DEAD_LETTERS,
    jetstream.records_stream(1 << 20, 60),
    jetstream.audit_stream(1 << 20, 60),
    jetstream.outcomes_stream(1 << 20, 60),
    jetstream.KEYS,
    jetstream.SPENDING,
    jetstream.DAYS,
    jetstream.POLICIES,
    jetstream.SECRETS,
    jetstream.DRAINS,
    jetstream.answers_bucket(1 << 20, 60),
    jetstream.API_KEYS,
    StreamConfig(name=PROMPTS, subjects=["prompts.>"], allow_direct=True),
)


def subject_in(config: StreamConfig) -> str:
    """One that the stream takes."""
    (pattern,) = config.subjects or ()
    return next(one for one in SUBJECTS if subjects.covers(pattern, one))


def test_every_stream_belongs_to_an_account() -> None:
    known = {
        value for name, value in vars(subjects).items() if name.endswith(("_STREAM", "_BUCKET"))
    }
    tried = {config.name for config in (*OF_JOBS, *OF_GATEWAYS)}
    assert tried - {PROMPTS} == known
    rights = permissions(GATEWAY, "p")
    assert rights is not None
    created = {stream for stream in known if f"$JS.API.STREAM.CREATE.{stream}" in rights.publish}
    assert known - created == {config.name for config in OF_JOBS}


def test_the_requests_that_are_tried_are_those_of_the_server() -> None:
    """Names stand in the program one behind another, so some have the beginning of the next one at their end."""
    program = Path(find_nats_server()).resolve().read_bytes()
    names = {
        name.decode().rstrip(".")
        for name in re.findall(rb"\$JS\.API\.([A-Z]{4,}[A-Z._]*)", program)
    }
    tried = {template.partition("{")[0].rstrip(".") for template, _ in (*API, *DELETING)}
    tried = {name.removesuffix(".THIEF") for name in tried}
    groups = {"ACCOUNT", "CONSUMER", "DIRECT", "META", "SERVER", "STREAM"}
    unknown = {
        name
        for name in names - groups
        if not any(name.startswith(one) or one.startswith(f"{name}") for one in tried)
    }
    assert names >= {"STREAM.UPDATE", "CONSUMER.RESET", "DIRECT.GET"}
    assert unknown == set()


def test_jobs_read_only_the_streams_of_the_operators_list() -> None:
    right = f"$JS.API.STREAM.MSG.GET.{PROMPTS}"
    assert right in crossing(JOBS, "j1", [PROMPTS]).requests
    assert right not in crossing(JOBS, "j1").requests
    assert right not in crossing(BATCHER, "b1", [PROMPTS]).requests


def test_no_stream_takes_what_another_account_says() -> None:
    """It would answer on the reply subject that the message names, in the account of gateways."""
    for kind, process in USERS.values():
        for subject in crossing(kind, process).publishes:
            for config in OF_GATEWAYS:
                assert not any(subjects.covers(taken, subject) for taken in config.subjects or ())


def test_batchers_that_share_a_credential_share_an_account() -> None:
    made = accounts({kind: (kind, "*") for kind in KINDS})
    assert set(made) == {GATEWAYS, JOBS, "batchers"}


async def test_subscriptions_of_a_connection_are_bounded(tmp_path: Path) -> None:
    async with secured_nats(tmp_path, USERS) as (url, authority):
        closed = asyncio.Event()

        async def disconnected() -> None:
            closed.set()

        greedy = await nats.connect(
            url,
            tls=ClientContext(authority.of("b1")).context,
            error_cb=ignore,
            disconnected_cb=disconnected,
            allow_reconnect=False,
        )
        async with connected(url, authority, BATCHER, "b2"):
            for number in range(SUBSCRIPTIONS + 1):
                await greedy.subscribe(f"sluice.x.{number}")
            async with asyncio.timeout(BOUND_S):
                await closed.wait()


def test_accounts_speak_for_their_own_processes() -> None:
    assert may_send_as("batcher-b1", BATCHER, "b1")
    assert may_send_as("batchers", BATCHER, "b1")
    assert may_send_as("", BATCHER, "b1")
    assert may_send_as("jobs", JOBS, "j1")
    assert not may_send_as("batcher-b1", BATCHER, "b2")
    assert not may_send_as("batcher-b1", GATEWAY, "g1")
    assert not may_send_as("batcher-b1", JOBS, "j1")
    assert not may_send_as("batcher-b1", "worker", "w")


def test_accounts_have_limits() -> None:
    made = accounts({"b1": (BATCHER, "b1"), "g1": (GATEWAY, "g1")})
    limits = {name: section["limits"] for name, section in made.items()}
    assert limits["batcher-b1"]["max_connections"] == OWN_CONNECTIONS
    assert all(one["max_subscriptions"] == SUBSCRIPTIONS for one in limits.values())
    assert all(one["max_payload"] == MAX_MESSAGE_BYTES for one in limits.values())


@dataclass
class Mesh:
    """Connections by process; two of each kind may be in one account."""

    clients: dict[str, Client]

    def __getitem__(self, process: str) -> Client:
        return self.clients[process]

    async def states(self) -> dict[str, StreamInfo]:
        """Every stream, without what changes by itself."""
        found: dict[str, StreamInfo] = {}
        for process in (OPERATOR, "j1"):
            for info in await self[process].jetstream().streams_info():
                assert info.config.name is not None
                found.setdefault(info.config.name, info)
        return found

    async def attack(
        self, process: str, others: Iterable[StreamConfig], *, every: bool = False
    ) -> None:
        """Try every way to the streams ``others`` and to every subject with the credentials of ``process``.

        ``every``: as of `try_all`.
        """
        client, barrier, (kind, id_) = self[process], self[OPERATOR], USERS[process]
        for rows in (API, DELETING):
            await try_all(client, kind, id_, pairs_of(others), SUBJECTS, barrier, rows, every=every)
        await publish_all(client, SUBJECTS, barrier)
        server = str(client._server_info["server_id"])
        await ask_system(client, server, f"{inbox(kind, id_)}.system")
        for one in self.clients.values():
            await settle(one, BOUND_S)


def pairs_of(streams: Iterable[StreamConfig]) -> list[tuple[str, str]]:
    """Names, each with a subject of its stream."""
    return [(str(config.name), subject_in(config)) for config in streams]


async def fill(js: nats.js.JetStreamContext, streams: Iterable[StreamConfig]) -> None:
    for config in streams:
        await js.add_stream(config)
        assert config.name is not None
        await js.publish(subject_in(config), secret_of(config.name))


async def ignore(_: Exception) -> None:
    """The server tells each refused message."""


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    opening = secured_nats(tmp_path, USERS, (PROMPTS,))
    async with opening as (url, authority), AsyncExitStack() as stack:
        clients = {}
        for process, (kind, _) in {**USERS, OPERATOR: (OPERATOR, OPERATOR)}.items():
            # Not that of a process of the mesh, which drops what it did not ask JetStream for.
            context = ClientContext(authority.of(process)).context
            prefix = inbox(kind, process)
            client = await nats.connect(url, tls=context, inbox_prefix=prefix, error_cb=ignore)
            stack.push_async_callback(client.close)
            clients[process] = client
        js = clients[OPERATOR].jetstream()
        await fill(js, OF_GATEWAYS)
        await fill(clients["j1"].jetstream(), OF_JOBS)
        yield Mesh(clients)


@pytest.mark.parametrize("process", ["b1", "j1"])
async def test_a_process_hears_what_is_its_own_and_nothing_else(mesh: Mesh, process: str) -> None:
    client = mesh[process]
    messages = await hear(client, (">", "sluice.>", "$JS.>", "$KV.>", "_INBOX.>", "$SYS.>"))
    for subject in SUBJECTS:
        await client.subscribe(subject, queue="thieves")
    await settle(client, BOUND_S)
    for other in mesh.clients.keys() - {process}:
        for subject in SUBJECTS:
            await mesh[other].publish(subject, other.encode())
        await settle(mesh[other], BOUND_S)
    await settle(client, BOUND_S)
    by_sender = {
        other: {one.subject for _, one in messages if one.data == other.encode()}
        for other in mesh.clients.keys() - {process}
    }
    by_gateways = by_sender.pop("g1") | by_sender.pop("g2") | by_sender[OPERATOR]
    assert (by_gateways, by_sender.pop(OPERATOR)) == (HEARS[process], HEARS[process])
    assert not any(by_sender.values())


@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["each once", "every pair"]
)
@pytest.mark.parametrize("process", ["b1", "j1"])
async def test_a_process_reaches_nothing_else_by_any_way(
    mesh: Mesh, process: str, every: bool
) -> None:
    kind, id_ = USERS[process]
    others = [one for one in ("b1", "b2", "j1") if one != process]
    before = await mesh.states()
    own = await hear(mesh[process])
    elsewhere = {one: await hear(mesh[one], SUBJECTS) for one in (OPERATOR, *others)}
    of_others = [*OF_GATEWAYS, *(OF_JOBS if kind != JOBS else ())]
    await mesh.attack(process, of_others, every=every)
    reached = {one: {pattern for pattern, _ in found} for one, found in elsewhere.items()}
    assert reached.pop(OPERATOR) == SAYS[process]
    assert not any(reached.values())
    assert found_in(own, (str(config.name) for config in of_others)) == READS[process]
    told = b"\n".join(one.data for _, one in own if one.subject == f"{inbox(kind, id_)}.system")
    assert not any(identity(other).encode() in told for other in mesh.clients.keys() - {process})
    after = await mesh.states()
    names = [str(config.name) for config in of_others]
    assert not {name for name in names if before[name] != after.get(name)}
    assert all(before[name].config == after[name].config for name in names)


async def test_gateway_reaches_other_accounts_by_what_they_hear(mesh: Mesh) -> None:
    before = await mesh.states()
    own = await hear(mesh[OPERATOR])
    elsewhere = {one: await hear(mesh[one], SUBJECTS) for one in ("b1", "b2", "j1")}
    await mesh.attack("g1", OF_JOBS)
    reached = {one: {pattern for pattern, _ in found} for one, found in elsewhere.items()}
    assert reached["b1"] == HEARS["b1"]
    assert reached["b2"] == {one.replace("b1", "b2") for one in reached["b1"]}
    assert reached["j1"] == HEARS["j1"]
    names = [str(config.name) for config in OF_JOBS]
    assert found_in(own, names) == set()
    after = await mesh.states()
    assert [before[name] for name in names] == [after[name] for name in names]


async def test_in_one_account_the_same_ways_reach_everything(tmp_path: Path) -> None:
    """The answers to one question are enough; with consumers streams would fill each other for ever."""
    every = (*OF_GATEWAYS, *OF_JOBS)
    names = {str(config.name) for config in every}
    async with running_nats(tmp_path) as url:
        client, operator = [await nats.connect(url, error_cb=ignore) for _ in range(2)]
        await fill(operator.jetstream(), every)
        own, reached = await hear(client), await hear(operator, SUBJECTS)
        asking = [row for row in API if row[0].startswith("STREAM.MSG.GET.{")]
        await try_all(client, BATCHER, "b1", pairs_of(every), (), operator, asking)
        assert found_in(own, names) == names
        await try_all(client, BATCHER, "b1", pairs_of(every), SUBJECTS, operator, asking)
        await settle(operator, BOUND_S)
        refused = {one for one in SUBJECTS if one.startswith("$JS.ACK.")}  # as a reply subject
        assert {pattern for pattern, _ in reached} == set(SUBJECTS) - refused
        keys = await operator.jetstream().stream_info(subjects.API_KEYS_BUCKET)
        assert keys.state.last_seq > 1
        await try_all(client, BATCHER, "b1", pairs_of(every), (), operator, DELETING)
        assert await operator.jetstream().streams_info() == []
        await client.close()
        await operator.close()


async def test_an_unknown_process_is_refused_by_the_name_of_its_file(tmp_path: Path) -> None:
    async with secured_nats(tmp_path, USERS) as (url, authority):
        authority.issue("stranger")
        with pytest.raises(NatsUnreachable, match=r"refuses the certificate .*/stranger/tls.crt"):
            async with connected(url, authority, BATCHER, "stranger"):
                pass


async def test_both_sides_refuse_another_authoritys_certificate(tmp_path: Path) -> None:
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
