"""`sluice keys`: makes, lists, replaces and revokes API keys.

It writes to the NATS of the mesh, so it works before there is a first key: whoever may read the mesh's configuration
makes it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cli import options, output
from cli.failure import CommandFailed
from cli.mesh_nats import Config, connected, settings_of
from cli.option_groups import Commands, Group
from sluice.defaults import CALLER, ROLES

if TYPE_CHECKING:
    from sluice.internal.v1.identity_pb2 import ApiKeyRecord
    from sluice.wire.bucket import Bucket

DAY_MS: Final = 86_400_000
NAME_CHARS_MAX: Final = 64

keys = Commands(help="Make, list, replace and revoke API keys.", no_args_is_help=True)

KeyId = Annotated[str, typer.Argument(metavar="ID", help="Of `sluice keys list`.")]


def _runner(
    config: Config = None, state_dir: options.StateDir = None
) -> Callable[[Callable[["Bucket"], Awaitable[Any]]], Any]:
    """Runs what it is given with the bucket of the keys, and returns its result."""
    from sluice.wire import jetstream
    from sluice.wire.bucket import Bucket

    async def run(act: Callable[["Bucket"], Awaitable[Any]]) -> Any:
        settings = settings_of(config, state_dir)
        if not settings.identity.api_keys:
            output.note("identity.api_keys is not set: this mesh does not ask for keys yet")
        async with connected(settings) as client:
            bucket = Bucket(jetstream.API_KEYS, settings.nats.replicas)
            await bucket.start(client)
            return await act(bucket)

    return lambda act: asyncio.run(run(act))


InBucket = Annotated[Callable[[Callable[["Bucket"], Awaitable[Any]]], Any], Group(_runner)]


@keys.command()
def create(
    *,
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose calls it makes.")],
    role: Annotated[
        list[str] | None,
        typer.Option(help="caller, operator or auditor; may be repeated.  [default: caller]"),
    ] = None,
    name: Annotated[str, typer.Option(help="For people.")] = "",
    expires_days: Annotated[
        float | None, typer.Option(min=0, help="Refused after so many days.  [default: never]")
    ] = None,
    requests_per_minute: Annotated[
        float, typer.Option(min=0, help="Its own limit, beside those of its tenant.")
    ] = 0.0,
    tokens_per_minute: Annotated[float, typer.Option(min=0, help="The same of tokens.")] = 0.0,
    in_bucket: InBucket,
    as_json: options.Json = False,
) -> None:
    """Make a key. It is printed once, and stored nowhere: only its hash is.

    A caller asks models and has jobs. An operator also changes what other tenants have, an auditor reads it.
    """
    from sluice.internal.v1.identity_pb2 import ApiKeyRecord
    from sluice.wire.clock import unix_ms
    from sluice.wire.subjects import is_token

    if not is_token(tenant):
        raise CommandFailed(
            "USAGE", f"TENANT: {tenant!r}: use up to 64 letters, digits, '-' and '_'"
        )
    if strange := set(role or ()) - set(ROLES):
        raise CommandFailed("USAGE", f"--role {min(strange)}: use {', '.join(ROLES)}")
    now = int(unix_ms())
    record = ApiKeyRecord(
        tenant=tenant,
        roles=sorted(set(role or [CALLER])),
        name=name[:NAME_CHARS_MAX],
        create_unix_ms=now,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        expire_unix_ms=0 if expires_days is None else now + int(expires_days * DAY_MS),
    )

    async def make(bucket: "Bucket") -> dict[str, Any]:
        return _shown(*await _write_new(bucket, record))

    _write_made(in_bucket(make), as_json)


@keys.command("list")
def list_(
    *,
    tenant: Annotated[str | None, typer.Option(help="Those of one tenant.")] = None,
    in_bucket: InBucket,
    as_json: options.Json = False,
) -> None:
    """List the keys: whose they are, what they may do, and until when."""
    from sluice.internal.v1.identity_pb2 import ApiKeyRecord

    async def read(bucket: "Bucket") -> list[dict[str, Any]]:
        found = [
            (record.create_unix_ms, _described(key, record))
            async for key, record in bucket.read_all(ApiKeyRecord)
            if tenant in (None, record.tenant)
        ]
        return [described for _, described in sorted(found, key=lambda one: one[0])]

    found = in_bucket(read)
    columns = ("id", "tenant", "roles", "name", "created", "state")
    rows = [[one[column] for column in columns] for one in found]
    output.show(as_json, {"keys": found}, lambda: output.write_table(columns, rows))


@keys.command()
def rotate(
    *,
    key_id: KeyId,
    overlap_s: Annotated[
        float, typer.Option(min=0, help="How long the old key still works.")
    ] = 3600.0,
    in_bucket: InBucket,
    as_json: options.Json = False,
) -> None:
    """Make a new key in place of one, which works for another hour."""
    from sluice.internal.v1.identity_pb2 import ApiKeyRecord
    from sluice.wire.clock import unix_ms

    async def replace(bucket: "Bucket") -> dict[str, Any]:
        old, revision = await _read(bucket, key_id)
        if old.revoke_unix_ms:
            raise CommandFailed("KEY_REVOKED", f"{key_id} was revoked; make a new key instead")
        now, new = int(unix_ms()), ApiKeyRecord()
        new.CopyFrom(old)
        new.create_unix_ms = now
        made = await _write_new(bucket, new)
        until = now + int(overlap_s * 1000)
        old.expire_unix_ms = min(old.expire_unix_ms or until, until)
        await _write(bucket, key_id, old, revision)
        return _shown(*made)

    _write_made(in_bucket(replace), as_json)


@keys.command()
def revoke(
    *,
    key_id: KeyId,
    in_bucket: InBucket,
    as_json: options.Json = False,
) -> None:
    """Revoke a key: within 5 seconds every gateway refuses it."""
    from sluice.wire.clock import unix_ms

    async def end(bucket: "Bucket") -> dict[str, Any]:
        record, revision = await _read(bucket, key_id)
        if not record.revoke_unix_ms:
            record.revoke_unix_ms = int(unix_ms())
            await _write(bucket, key_id, record, revision)
        return _described(key_id, record)

    revoked = in_bucket(end)
    text = f"{key_id} of {revoked['tenant']} is revoked; gateways refuse it within 5 s"
    output.show(as_json, revoked, text)


async def _read(bucket: "Bucket", key_id: str) -> tuple["ApiKeyRecord", int]:
    from sluice.internal.v1.identity_pb2 import ApiKeyRecord
    from sluice.wire.subjects import is_token

    found = await bucket.read(key_id, ApiKeyRecord) if is_token(key_id) else None
    if found is None:
        raise CommandFailed("KEY_UNKNOWN", f"there is no key {key_id!r}; see: sluice keys list")
    return found


async def _write(bucket: "Bucket", key_id: str, record: "ApiKeyRecord", revision: int) -> None:
    if await bucket.write(key_id, record, revision) is None:
        raise CommandFailed("KEY_CHANGED", f"{key_id} was changed at the same time; try again")


async def _write_new(bucket: "Bucket", record: "ApiKeyRecord") -> tuple[str, "ApiKeyRecord", str]:
    from sluice.wire.api_keys import digest_of, new_key

    made = new_key()
    record.digest = digest_of(made.text)
    await _write(bucket, made.id, record, 0)
    return made.id, record, made.text


def _shown(key_id: str, record: "ApiKeyRecord", text: str) -> dict[str, Any]:
    return {"key": text, **_described(key_id, record)}


def _write_made(made: dict[str, Any], as_json: bool) -> None:
    if as_json:
        output.write_json(made)
        return
    print(made["key"])
    output.note(
        f"{made['id']}, {made['roles']} of {made['tenant']}: shown this once. "
        "Gateways know it within 5 s; use it with: export SLUICE_API_KEY=..."
    )


def _described(key_id: str, record: "ApiKeyRecord") -> dict[str, Any]:
    return {
        "id": key_id,
        "tenant": record.tenant,
        "roles": ",".join(role for role in ROLES if role in record.roles),
        "name": record.name,
        "created": _time(record.create_unix_ms),
        "state": _state(record),
    }


def _state(record: "ApiKeyRecord") -> str:
    if record.revoke_unix_ms:
        return f"revoked {_time(record.revoke_unix_ms)}"
    if not record.expire_unix_ms:
        return "active"
    over = record.expire_unix_ms <= time.time() * 1000
    return f"{'expired' if over else 'until'} {_time(record.expire_unix_ms)}"


def _time(unix_ms: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_ms / 1000))
