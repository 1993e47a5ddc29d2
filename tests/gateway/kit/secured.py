"""A gateway that asks who calls, and callers of several tenants and roles."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import nats

from sluice.settings import IdentitySettings
from sluice.v1 import inference_pb2 as pb
from sluice.wire import jetstream
from sluice.wire.bucket import Bucket
from tests.gateway.kit.batcher import last
from tests.gateway.kit.issuer import Issuer, bearer, make_key
from tests.gateway.kit.wire import Wire, events_of, open_wire, prompt

MESH_KEY: Final = "0123456789abcdef"


@dataclass
class Secured:
    """A gateway that asks who calls, and credentials by name."""

    wire: Wire
    issuer: Issuer
    keys: dict[str, str]

    def __getitem__(self, name: str) -> tuple[tuple[str, str], ...]:
        return bearer(self.keys[name])

    async def answered(self, name: str, **fields: Any) -> tuple[str, list[pb.GenerateResponse]]:
        """The id and the events of a request of ``name`` that is answered "hello"."""
        call = self.wire.stub.Generate(prompt(**fields), metadata=self[name])
        task = await self.wire.batcher.task()
        await self.wire.batcher.send(task, last(0, self.wire.tokens("hello")))
        return task.request_id, await events_of(call)


@asynccontextmanager
async def secured(
    url: str, model_folder: Path, path: Path, **options: Any
) -> AsyncIterator[Secured]:
    issuer = Issuer()
    client = await nats.connect(url)
    bucket = Bucket(jetstream.API_KEYS)
    await bucket.start(client)
    keys = {
        "acme": (await make_key(bucket, "acme"))[1],
        "other": (await make_key(bucket, "other"))[1],
        "operator": (await make_key(bucket, "ops", "operator"))[1],
        "auditor": (await make_key(bucket, "audits", "auditor"))[1],
        "token": issuer.token("acme"),
        "mesh": MESH_KEY,
    }
    identity = IdentitySettings(
        api_keys=True, jwt=(issuer.written(path / "jwks.json"),), mesh_key=MESH_KEY
    )
    await client.close()
    async with open_wire(url, model_folder, identity=identity, **options) as wire:
        yield Secured(wire, issuer, keys)
