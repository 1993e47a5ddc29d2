"""`sluice keys`: makes, lists, replaces and revokes API keys.

It writes to the NATS of the mesh, so it works before there is a first key: whoever may read the mesh's configuration
makes it.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from typer import Argument, Option

from cli import options, output
from cli.commands import Commands, Group, wants_json
from cli.failure import CommandFailed
from sluice.defaults import CALLER, ROLES
from sluice.internal.v1.identity_pb2 import ApiKeyRecord
from sluice.wire.api_keys import NewKey, digest_of, new_key
from sluice.wire.clock import unix_ms
from sluice.wire.subjects import is_token

if TYPE_CHECKING:
    from nats.aio.client import Client

    from sluice.settings import Settings
    from sluice.wire.bucket import Bucket

DAY_MS: Final = 86_400_000
NAME_CHARS_MAX: Final = 64

keys = Commands("Make, list, replace and revoke API keys.")

KeyId = Annotated[str, Argument(help="As `sluice keys list` shows it.", metavar="ID")]


@dataclass(frozen=True)
class Keys:
    """The keys of a mesh, as JetStream keeps them."""

    runner: asyncio.Runner
    client: "Client"
    bucket: "Bucket"

    def get(self, key_id: str) -> tuple[ApiKeyRecord, int]:
        """Return the key and its revision, which `store` takes; raise CommandFailed if there is none."""
        if is_token(key_id) and (stored := self.runner.run(self.bucket.read(key_id, ApiKeyRecord))):
            return stored
        raise CommandFailed("KEY_UNKNOWN", f"there is no key {key_id!r}; see: sluice keys list")

    def store(self, *changes: tuple[str, ApiKeyRecord, int]) -> None:
        """Store keys, each in place of its revision (0: a new one), and wait a while until every gateway knows them.

        Raises:
            CommandFailed: a key was changed meanwhile; those before it are stored.
        """
        from sluice.wire.key_changes import refresh_keys

        for key_id, record, revision in changes:
            if self.runner.run(self.bucket.write(key_id, record, revision)) is None:
                message = f"{key_id} was changed at the same time; try again"
                raise CommandFailed("KEY_CHANGED", message)
        for gateway in self.runner.run(refresh_keys(self.client)):
            output.note(
                f"gateway {gateway} did not respond; it takes the change within a second of its next "
                "contact with NATS"
            )


@contextmanager
def _keys(
    config: Path | None = Option(None, help="YAML file of the mesh."),
    state_dir: options.StateDir = None,
) -> Iterator[Keys]:
    from sluice.wire import jetstream
    from sluice.wire.bucket import Bucket
    from sluice.wire.connection import connect, disconnect
    from sluice.wire.permissions import OPERATOR

    settings = _settings_of(config, state_dir)
    if not settings.identity.api_keys:
        output.note("identity.api_keys is not set: this mesh does not ask for keys yet")
    with asyncio.Runner() as runner:
        connecting = connect(settings.nats, OPERATOR, OPERATOR, lambda: None, settings.tls.mesh)
        client = runner.run(connecting)
        try:
            bucket = Bucket(jetstream.API_KEYS, settings.nats.replicas)
            runner.run(bucket.start(client))
            yield Keys(runner, client, bucket)
        finally:
            runner.run(disconnect(client))


OfMesh = Annotated[Keys, Group(_keys)]


@keys.command()
def create(
    *,
    tenant: str = Argument(..., help="Whose calls it makes.", metavar="TENANT"),
    role: list[str] | None = Option(None, help="caller, operator or auditor.  [default: caller]"),
    name: str = Option("", help="Name of the key, for people."),
    expires_days: float | None = Option(None, help="Expiry, in days.  [default: never]", min=0),
    requests_per_minute: float = Option(0.0, help="Limit of this key alone.", min=0),
    tokens_per_minute: float = Option(0.0, help="Limit of tokens per minute of this key.", min=0),
    mine: OfMesh,
) -> None:
    """Make a key. It is printed once, and stored nowhere: only its hash is.

    A caller asks models and has jobs. An operator also changes what other tenants have, an auditor reads it.
    """
    if not is_token(tenant):
        message = f"TENANT: {tenant!r}: use up to 64 letters, digits, '-' and '_'"
        raise CommandFailed("USAGE", message)
    if strange := set(role or ()) - set(ROLES):
        raise CommandFailed("USAGE", f"--role {min(strange)}: use {', '.join(ROLES)}")
    now = unix_ms()
    record = ApiKeyRecord(
        tenant=tenant,
        roles=sorted(set(role or [CALLER])),
        name=name[:NAME_CHARS_MAX],
        create_unix_ms=now,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        expire_unix_ms=0 if expires_days is None else now + int(expires_days * DAY_MS),
    )
    made = new_key()
    record.digest = digest_of(made.text)
    mine.store((made.id, record, 0))
    _show_made(made, record)


@keys.command("list")
def list_(
    *,
    tenant: str | None = Option(None, help="Only requests of this tenant."),
    mine: OfMesh,
) -> None:
    """List API keys with tenant, roles and expiry."""

    async def read() -> list[tuple[str, ApiKeyRecord]]:
        return [one async for one in mine.bucket.read_all(ApiKeyRecord)]

    records = sorted(mine.runner.run(read()), key=lambda one: one[1].create_unix_ms)
    keys_shown = [_described(*one) for one in records if tenant in (None, one[1].tenant)]
    columns = ("id", "tenant", "roles", "name", "created", "state")
    rows = ([one[column] for column in columns] for one in keys_shown)
    output.show({"keys": keys_shown}, lambda: output.write_table(columns, rows))


@keys.command()
def rotate(
    *,
    key_id: KeyId,
    overlap_s: float = Option(3600.0, help="How long the old key stays valid, in seconds.", min=0),
    mine: OfMesh,
) -> None:
    """Replace a key by a new one; the old one stays valid for another hour."""
    old, revision = mine.get(key_id)
    if old.revoke_unix_ms:
        raise CommandFailed("KEY_REVOKED", f"{key_id} was revoked; make a new key instead")
    now, made, new = unix_ms(), new_key(), ApiKeyRecord()
    new.CopyFrom(old)
    new.create_unix_ms, new.digest = now, digest_of(made.text)
    until = now + int(overlap_s * 1000)
    old.expire_unix_ms = min(old.expire_unix_ms or until, until)
    mine.store((made.id, new, 0), (key_id, old, revision))
    _show_made(made, new)


@keys.command()
def revoke(key_id: KeyId, mine: OfMesh) -> None:
    """Revoke a key: every gateway refuses it once this command has returned."""
    record, revision = mine.get(key_id)
    record.revoke_unix_ms = record.revoke_unix_ms or unix_ms()
    mine.store((key_id, record, revision))
    text = f"{key_id} of {record.tenant} is revoked; gateways refuse it now"
    output.show(_described(key_id, record), text)


def _settings_of(config: Path | None, state_dir: Path | None) -> "Settings":
    """Return the settings of `config`, of the environment if that names a NATS, or of the state folder.

    Raises:
        CommandFailed: no mesh has been started with that state folder, or the settings name no NATS.
        SettingsError: the file cannot be used.
    """
    from sluice.settings import load

    if config is None and os.environ.get("SLUICE_NATS__URL"):
        return load()
    if config is None:
        from supervisor.state import StateDir

        state = StateDir(state_dir)
        config = state.config
        if not config.exists():
            message = f"{state.root} has no mesh; start it with sluice up, or name --config"
            raise CommandFailed("NO_MESH", message)
    settings = load(config)
    if settings.nats.url is None:
        message = f"{config}: nats.url: is not set, so it does not say which mesh"
        raise CommandFailed("NO_MESH", message)
    return settings


def _show_made(made: NewKey, record: ApiKeyRecord) -> None:
    output.show({"key": made.text, **_described(made.id, record)}, made.text)
    if not wants_json():
        output.note(
            f"{made.id}, {_roles(record)} of {record.tenant}: shown this once. "
            "Use it with: export SLUICE_API_KEY=..."
        )


def _described(key_id: str, record: ApiKeyRecord) -> dict[str, Any]:
    return {
        "id": key_id,
        "tenant": record.tenant,
        "roles": _roles(record),
        "name": record.name,
        "created": _time(record.create_unix_ms),
        "state": _state(record),
    }


def _roles(record: ApiKeyRecord) -> str:
    return ",".join(role for role in ROLES if role in record.roles)


def _state(record: ApiKeyRecord) -> str:
    if record.revoke_unix_ms:
        return f"revoked {_time(record.revoke_unix_ms)}"
    if not record.expire_unix_ms:
        return "active"
    over = record.expire_unix_ms <= time.time() * 1000
    return f"{'expired' if over else 'until'} {_time(record.expire_unix_ms)}"


def _time(unix_ms: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_ms / 1000))
