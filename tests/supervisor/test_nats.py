import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest

from sluice.errors import SetupError
from sluice.settings import NatsSettings
from sluice.startup import free_port
from sluice.wire import permissions
from sluice.wire.codec import MAX_MESSAGE_BYTES
from sluice.wire.connection import NatsUnreachable, connect
from supervisor.child import Child, ChildSpec
from supervisor.nats import (
    MEMORY,
    NatsConfig,
    nats_command,
    nats_environment,
    wait_for_nats,
)

READY_S = 60.0


@asynccontextmanager
async def running(config: NatsConfig, folder: Path) -> AsyncIterator[str]:
    command = nats_command(config, folder / "nats.conf")
    env = {**os.environ, **nats_environment(config)}
    spec = ChildSpec("nats", command, env=env, log=folder / "nats.log")
    child = Child(spec)
    try:
        await wait_for_nats(config.url_of(permissions.OPERATOR), READY_S)
        yield config.url
    finally:
        assert await child.end(5.0) == 0, "a server that is asked to end does so in time"


def test_the_server_keeps_to_an_amount_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = NatsConfig(port=4222, store=tmp_path / "js")
    monkeypatch.delenv("GOMEMLIMIT", raising=False)
    assert nats_environment(config) == {"GOMEMLIMIT": MEMORY}
    monkeypatch.setenv("GOMEMLIMIT", "2GiB")
    assert nats_environment(config) == {"GOMEMLIMIT": "2GiB"}


@pytest.mark.parametrize(
    "name", ['js "odd" dir', "jürgen", "日本", "a'b", "$HOME", "a;b&c", "a\\\\b", "#x"]
)
def test_nats_accepts_a_store_of_any_name(tmp_path: Path, name: str) -> None:
    config = NatsConfig(port=4222, store=tmp_path / name)
    argv = nats_command(config, tmp_path / "nats.conf")
    checked = subprocess.run([*argv, "-t"], capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stderr
    assert 'host: "127.0.0.1"' in (tmp_path / "nats.conf").read_text()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="choose a folder"):
        nats_command(NatsConfig(4222, tmp_path / "file" / "js"), tmp_path / "nats.conf")


async def test_larger_messages_are_refused(tmp_path: Path) -> None:
    async with running(NatsConfig(free_port(), tmp_path / "js"), tmp_path) as url:
        client = await nats.connect(url)
        assert client.max_payload == MAX_MESSAGE_BYTES
        with pytest.raises(nats.errors.MaxPayloadError):
            await client.publish("s", bytes(MAX_MESSAGE_BYTES + 1))
        await client.close()


async def test_waiting_may_begin_before_the_server(tmp_path: Path) -> None:
    config = NatsConfig(free_port(), tmp_path / "js")
    waiting = asyncio.create_task(wait_for_nats(f"nats://127.0.0.1:{config.port}", READY_S))
    async with running(config, tmp_path):
        await waiting


TEXT = b"canary of a prompt"


def files_with(folder: Path, *words: bytes) -> list[str]:
    """Files below ``folder`` that have one of ``words`` in them, or in their name."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [
        path.name
        for path in files
        if any(word in path.read_bytes() or word in str(path).encode() for word in words)
    ]


async def keep(url: str) -> None:
    client = await nats.connect(url)
    await client.jetstream().add_stream(name="S", subjects=["s.>"])
    await client.jetstream().publish("s.acme", TEXT)
    await client.close()


@pytest.mark.parametrize("key", ["k" * 32, "1e5+/=_.-" * 5])
async def test_encrypted_files_have_no_text_and_need_their_key(tmp_path: Path, key: str) -> None:
    store = tmp_path / "js"
    config = NatsConfig(free_port(), store, encryption_key=key)
    async with running(config, tmp_path) as url:
        await keep(url)
    assert not files_with(tmp_path, TEXT, b"acme", key.encode())
    async with running(config, tmp_path) as url:
        client = await nats.connect(url)
        assert (await client.jetstream().get_msg("S", 1)).data == TEXT
        await client.close()
    for other, says in ((None, "is not set"), ("another" * 8, "another key")):
        with pytest.raises(SetupError, match=f"nats.encryption_key: .*{says}"):
            nats_command(NatsConfig(4222, store, encryption_key=other), tmp_path / "nats.conf")


async def test_unencrypted_files_are_kept_once_there_is_a_key(
    tmp_path: Path,
) -> None:
    config = NatsConfig(free_port(), tmp_path / "js")
    async with running(config, tmp_path) as url:
        await keep(url)
    assert files_with(tmp_path, TEXT)
    async with running(replace(config, encryption_key="k" * 32), tmp_path) as url:
        client = await nats.connect(url)
        assert (await client.jetstream().get_msg("S", 1)).data == TEXT
        await client.close()
    assert not files_with(tmp_path, TEXT)


USERS = {
    "operator": (permissions.OPERATOR, "*"),
    "jobs": (permissions.JOBS, "*"),
    "batcher": (permissions.BATCHER, "*"),
}


def with_passwords(folder: Path, **fields: Any) -> NatsConfig:
    passwords = dict.fromkeys(USERS, "sesame")
    return NatsConfig(free_port(), folder, users=USERS, passwords=passwords, **fields)


async def test_a_user_without_a_password_gets_nothing(tmp_path: Path) -> None:
    config = with_passwords(tmp_path / "js")
    strangers = [config.url]
    strangers += [config.url_of(one).replace("sesame", "barley") for one in USERS]
    strangers += [f"nats://{one}@127.0.0.1:{config.port}" for one in USERS]
    async with running(config, tmp_path):
        for url in strangers:
            settings = NatsSettings(url=url)
            with pytest.raises(NatsUnreachable, match="refuses the credentials"):
                await connect(settings, permissions.BATCHER, "b", lambda: None)
    assert (tmp_path / "nats.conf").stat().st_mode & 0o777 == 0o600
    assert "sesame" not in repr(config)
