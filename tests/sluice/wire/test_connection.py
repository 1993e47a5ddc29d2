"""A process's connection, before a server that comes and goes."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, RePublish, StreamConfig

from sluice.settings import NatsSettings
from sluice.startup import answers, free_port
from sluice.wire import subjects
from sluice.wire.connection import NatsUnreachable, connect, disconnect, settle
from sluice.wire.permissions import OPERATOR
from supervisor.nats import find_nats_server
from tests.support.nats import nats_process_of, running_nats
from tests.support.proxy import Proxy
from tests.support.settings import tuned

BOUND_S = 60.0


def nothing() -> None:
    pass


async def test_the_streams_exist_once_it_stands(nats_url: str) -> None:
    client = await connect(NatsSettings(url=nats_url), OPERATOR, "test", nothing)
    await client.jetstream().stream_info(subjects.DEAD_LETTERS_STREAM)
    await disconnect(client)
    assert client.is_closed


async def test_without_a_server_the_error_says_where_and_what_to_do() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    with pytest.raises(NatsUnreachable, match=f"{url}.* 0.2 s; .*nats.url"):
        await connect(tuned(NatsSettings, url=url, connect_s=0.2), OPERATOR, "test", nothing)


async def test_connect_refuses_a_server_with_a_small_max_payload(tmp_path: Path) -> None:
    port, config = free_port(), tmp_path / "nats.conf"
    config.write_text(f'host: "127.0.0.1"\nport: {port}\nmax_payload: 65536\njetstream {{}}\n')
    command = str(find_nats_server()), "--config", str(config), "-sd", str(tmp_path / "store")
    url = f"nats://127.0.0.1:{port}"
    with (
        nats_process_of(command, tmp_path),
        pytest.raises(NatsUnreachable, match=r"max_payload is 65536, .*set max_payload: 1048576"),
    ):
        await connect(NatsSettings(url=url), OPERATOR, "test", nothing)


@pytest.mark.parametrize("user", ["", "sluice:wrong-password@"])
async def test_refused_credentials_are_named_without_the_password(
    tmp_path: Path, user: str
) -> None:
    port, path = free_port(), tmp_path / "nats.conf"
    path.write_text(f"port: {port}\nauthorization {{ user: sluice, password: right }}\n")
    with nats_process_of((str(find_nats_server()), "--config", str(path)), tmp_path):
        async with asyncio.timeout(BOUND_S):
            while not await asyncio.to_thread(answers, "127.0.0.1", port, 1.0):
                pass
        settings = NatsSettings(url=f"nats://{user}127.0.0.1:{port}")
        with pytest.raises(NatsUnreachable) as refused:
            await connect(settings, OPERATOR, "test", nothing)
    assert f"NATS at nats://127.0.0.1:{port} refuses the credentials: nats.url" in str(
        refused.value
    )
    assert "wrong-password" not in str(refused.value)


async def test_of_several_servers_one_is_enough(nats_url: str) -> None:
    urls = f"nats://127.0.0.1:{free_port()},{nats_url}"
    client = await connect(NatsSettings(url=urls), OPERATOR, "test", nothing)
    assert client.is_connected
    await disconnect(client)


async def test_a_server_that_comes_back_may_have_lost_something(tmp_path: Path) -> None:
    lost = asyncio.Event()
    async with running_nats(tmp_path) as url:
        client = await connect(NatsSettings(url=url), OPERATOR, "test", lost.set)
        assert not lost.is_set()
    async with running_nats(tmp_path, int(url.rsplit(":", 1)[1])), asyncio.timeout(BOUND_S):
        await lost.wait()
        await disconnect(client)


@pytest.mark.parametrize("full", [False, True], ids=["", "with full buffers"])
async def test_a_server_that_cannot_be_reached_is_left_for_another(
    nats_url: str, full: bool
) -> None:
    target, lost = int(nats_url.rsplit(":", 1)[1]), asyncio.Event()
    async with Proxy(target, free_port()) as one, Proxy(target, free_port()) as other:
        url = f"nats://127.0.0.1:{one.port},nats://127.0.0.1:{other.port}"
        client = await connect(NatsSettings(url=url), OPERATOR, "test", lost.set)
        (one if one.connections else other).cut()
        writing = asyncio.create_task(_write_on(client) if full else asyncio.sleep(0))
        async with asyncio.timeout(BOUND_S):
            await lost.wait()
            await client.flush()
        writing.cancel()
        await asyncio.wait([writing])
        await disconnect(client)


async def _write_on(client: Client) -> None:
    """More than the buffers of a connection hold."""
    with contextlib.suppress(NatsError, OSError):
        for _ in range(40):
            await client.publish("word", bytes(512 * 1024))


async def test_a_start_that_nats_does_not_see_to_its_end_says_so(nats_url: str) -> None:
    async with Proxy(int(nats_url.rsplit(":", 1)[1]), free_port()) as link:
        settings = NatsSettings(url=f"nats://127.0.0.1:{link.port}")
        client = await connect(settings, OPERATOR, "test", nothing)
        link.cut()
        with pytest.raises(NatsUnreachable, match="NATS does not answer within"):
            await settle(client, 0.1)
        link.heal()
        await disconnect(client)


async def test_a_late_answer_to_a_flush_that_gave_up_breaks_nothing(nats_url: str) -> None:
    """nats-py would stop to read, and be deaf until the pings tell."""
    lost = asyncio.Event()
    async with Proxy(int(nats_url.rsplit(":", 1)[1]), free_port()) as link:
        settings = NatsSettings(url=f"nats://127.0.0.1:{link.port}")
        client = await connect(settings, OPERATOR, "test", lost.set)
        heard = await client.subscribe("word")
        link.cut()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.flush()
        link.heal()
        await client.publish("word", b"after")
        assert (await heard.next_msg(timeout=BOUND_S)).data == b"after"
        assert not lost.is_set()
        await disconnect(client)


async def test_what_waits_is_sent_before_it_closes(nats_url: str) -> None:
    settings = NatsSettings(url=nats_url)
    first = await connect(settings, OPERATOR, "first", nothing)
    second = await connect(settings, OPERATOR, "second", nothing)
    heard = await first.subscribe("word")
    await settle(first, BOUND_S)
    await second.publish("word", b"last")
    await disconnect(second)
    assert (await heard.next_msg(timeout=BOUND_S)).data == b"last"
    await disconnect(first)


async def test_it_closes_while_the_server_is_away(tmp_path: Path) -> None:
    async with running_nats(tmp_path) as url:
        client = await connect(NatsSettings(url=url), OPERATOR, "test", nothing)
    async with asyncio.timeout(BOUND_S):
        await client.publish("word", b"never sent")
        await disconnect(client)
    assert client.is_closed


async def test_what_jetstream_sends_where_nobody_asked_it_is_dropped(nats_url: str) -> None:
    """Whoever may ask JetStream can have the answer sent to any subject of the account."""
    client = await connect(NatsSettings(url=nats_url), OPERATOR, "test", nothing)
    js = client.jetstream()
    republish = RePublish(src="kept.>", dest="word.again.>")
    config = StreamConfig(name="KEPT", subjects=["kept.>"], allow_direct=True, republish=republish)
    await js.add_stream(config)
    heard: list[Msg] = []
    ended = asyncio.Event()

    async def take(message: Msg) -> None:
        heard.append(message)
        if message.data == b"end":
            ended.set()

    await client.subscribe("word.>", cb=take)
    await js.publish("kept.x", b"stored")
    await client.publish("$JS.API.DIRECT.GET.KEPT.kept.x", b"", "word.direct")
    pushed = ConsumerConfig(ack_policy=AckPolicy.NONE, deliver_subject="word.pushed")
    await js.add_consumer("KEPT", pushed)
    await js.add_consumer("KEPT", ConsumerConfig(name="pull", durable_name="pull"))
    question = b'{"batch": 1, "no_wait": true}'
    await client.publish("$JS.API.CONSUMER.MSG.NEXT.KEPT.pull", question, "word.pulled")
    assert (await js.get_msg("KEPT", subject="kept.x", direct=True)).data == b"stored"
    await settle(client, BOUND_S)
    await client.publish("word.sent", b"end")
    async with asyncio.timeout(BOUND_S):
        await ended.wait()
    assert [one.data for one in heard] == [b"end"]
    await disconnect(client)


async def test_a_cancel_that_comes_with_the_answer_is_not_lost(nats_url: str) -> None:
    """``asyncio.wait_for`` of Python 3.11 returns the answer, and a loop around the request would go on forever."""
    client = await connect(NatsSettings(url=nats_url), OPERATOR, "test", nothing)

    asked, answered = asyncio.Event(), asyncio.Event()

    async def answer(message: Msg) -> None:
        asked.set()
        await answered.wait()
        await message.respond(b"yes")

    async def ask_forever() -> None:
        while True:
            await client.request("question", timeout=BOUND_S)

    def cancel(_: object) -> None:
        asking.cancel()

    await client.subscribe("question", cb=answer)
    asking = asyncio.create_task(ask_forever())
    async with asyncio.timeout(BOUND_S):
        await asked.wait()
        (reply,) = client._resp_map.values()
        reply.add_done_callback(cancel)
        answered.set()
        await asyncio.wait([asking])
    assert asking.cancelled()
    await disconnect(client)
