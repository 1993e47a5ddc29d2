"""Hostile tenants of tests/robustness/abuse.py, run in a process of their own that gives way to others (nice 10).

Each kind is a tenant with an API key of its own, and begins its calls at its rate in `ATTACKS`, whatever becomes of
those before; `OPEN_MAX` of a kind are open at most. What it began ends with the process; it deletes its jobs first. The
last line of its output has how the calls ended, by kind and code.

    python -m tests.robustness.hostile GRPC HTTP SECONDS     keys by tenant come as JSON on the standard input
"""

import asyncio
import gzip
import io
import json
import os
import random
import struct
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
import uvloop
from backports import zstd

from sluice.v1 import inference_pb2 as pb
from sluice.v1 import jobs_pb2
from sluice.v1.jobs_pb2_grpc import JobServiceStub
from sluice.v1.safety_pb2 import CheckTextRequest
from sluice.v1.safety_pb2_grpc import SafetyServiceStub
from tests.robustness import attacks
from tests.robustness.attacks import (
    CALL_S,
    LARGE,
    MODEL,
    PREFACE,
    Attacker,
    Outcomes,
    asked,
    constraints,
    long_chat,
    texts,
)

NICE: Final = 10
OPEN_MAX: Final = 64
MIB: Final = 1 << 20
UPLOAD_PIECE: Final = 500_000


class Tenant(Attacker):
    """One hostile tenant, with its connection."""

    def __init__(self, kind: str, address: str, http: str, key: str, hook: int) -> None:
        """``hook``: the port of the server that webhooks hang on."""
        super().__init__(address, hold_s=20.0, key=key)
        self.kind, self.http, self.key, self.hook = kind, http, key, hook
        self.calls = self.stub()
        self.jobs: Any = JobServiceStub(self.channels[0])
        self.random = random.Random(kind)
        self.number = 0
        self.made: list[str] = []
        """Jobs."""

    async def run(self, attack: Callable[["Tenant"], Awaitable[None]], per_s: float) -> None:
        """Begins calls until it is cancelled."""
        running: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        due = loop.time() + self.random.random() / per_s
        try:
            while True:
                await asyncio.sleep(max(0.0, due - loop.time()))
                due = max(due + 1 / per_s, loop.time() - 1.0)
                if len(running) >= OPEN_MAX:
                    self.outcomes["not begun"] += 1
                    continue
                self.number += 1
                task = asyncio.create_task(self.count("", attack(self)))
                running.add(task)
                task.add_done_callback(running.discard)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def job(self, name: str, data: bytes, spec: jobs_pb2.JobSpec) -> None:
        """Uploads ``data`` and makes a job of it; of its jobs the last 20 stay."""

        async def pieces() -> AsyncIterator[jobs_pb2.UploadInputRequest]:
            for at in range(0, len(data), UPLOAD_PIECE):
                piece = data[at : at + UPLOAD_PIECE]
                yield jobs_pb2.UploadInputRequest(name="" if at else name, data=piece)

        upload = await self.jobs.UploadInput(pieces(), **self.limits)
        spec.model, spec.input.upload_id = MODEL, upload.upload_id
        await self.create(spec)

    async def create(self, spec: jobs_pb2.JobSpec) -> str:
        """The id of a new job."""
        made = await self.jobs.CreateJob(jobs_pb2.CreateJobRequest(spec=spec), **self.limits)
        self.made.append(made.job.id)
        if len(self.made) > 20:
            await self.delete(self.made.pop(0))
        return str(made.job.id)

    async def delete(self, job: str) -> None:
        """A job and what is kept of it, as far as it can be."""
        limits: Any = {**self.limits, "timeout": 10.0}
        with suppress(grpc.aio.AioRpcError):
            await self.jobs.CancelJob(jobs_pb2.CancelJobRequest(id=job), **limits)
        with suppress(grpc.aio.AioRpcError):
            await self.jobs.DeleteJob(jobs_pb2.DeleteJobRequest(id=job), **limits)


async def schemas(tenant: Tenant) -> None:
    """A constraint that is slow to compile; the number makes it another one than before."""
    params = pb.SamplingParams()
    params.CopyFrom(tenant.random.choice(_constraints()))
    if params.HasField("json_schema"):
        params.json_schema = params.json_schema[:-1] + f',"title":"{tenant.number}"}}'
    else:
        params.regex += f"|{tenant.number}"
    await tenant.read(asked(prompt="a", sampling=params))


def _constraints() -> list[pb.SamplingParams]:
    patterns = [{"pattern": f".*{chr(97 + at)}{{{at + 1}}}.*{chr(98 + at)}"} for at in range(20)]
    files = "".join(rf"(File: {one}\n(\n|[^`].*?\n)*```\n\n)?" for one in "ABCDEFGH")
    slow = (
        pb.SamplingParams(max_tokens=8, json_schema=json.dumps({"allOf": patterns})),
        pb.SamplingParams(max_tokens=8, json_schema='{"type":"integer","multipleOf":9973}'),
        pb.SamplingParams(max_tokens=8, regex=files),
        pb.SamplingParams(max_tokens=8, regex=r"(.*a.{30})*b"),
    )
    return [*constraints(), *slow * 3]


_TEXTS: Final = tuple(texts().values())


async def inspected(tenant: Tenant) -> None:
    """A long text to be checked."""
    request = CheckTextRequest(text=tenant.random.choice(_TEXTS))
    stub: Any = SafetyServiceStub(tenant.channels[0])
    await stub.CheckText(request, **tenant.limits)


async def megabyte(tenant: Tenant) -> None:
    """1 MB in one of the fields."""
    others = (lambda: asked(prompt="lorem ipsum " * 80_000), lambda: asked(chat=long_chat()))
    await tenant.read(tenant.random.choice((*LARGE, *others))())


def _wav(samples: int, said: int) -> bytes:
    form = struct.pack("<HHIIHH", 1, 1, 16_000, 32_000, 2, 16)
    head = b"RIFF\xff\xff\xff\xffWAVEfmt " + struct.pack("<I", 16) + form + b"data"
    return head + struct.pack("<I", said) + bytes(2 * samples)


async def audio(tenant: Tenant) -> None:
    """Sound for models of which none takes any: it is received and looked at all the same."""
    data = tenant.random.choice(
        (_wav(450_000, 900_000), _wav(9, 2**32 - 1), b"RIFF\0\0\0\0WAVE" + b"LIST\0\0\0\0" * 90_000)
    )
    if tenant.number % 2:
        await tenant.read(asked(audio=pb.AudioInput(data=data)))
        return
    body = (
        b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\necho\r\n--x\r\nContent-Disposition: '
        b'form-data; name="file"; filename="a.wav"\r\n\r\n' + data + b"\r\n--x--\r\n"
    )
    kind = "multipart/form-data; boundary=x"
    await _post(tenant, "/v1/audio/transcriptions", body, kind=kind)


def _parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["x" * 900_000] * 2000}), file, compression="zstd")
    return file.getvalue()


_TABLES: Final[Mapping[str, Callable[[], bytes]]] = {
    "a.csv": lambda: b"id,prompt\n" + b'1,"' + b"x\n" * MIB,
    "b.csv": lambda: b"prompt\n" + b"\n" * (3 * MIB),
    "c.csv": lambda: b"a" * 999_999 + b",prompt\n" + b'"",' * 300_000,
    "d.parquet": _parquet,
    "e.parquet": lambda: b"PAR1" + os.urandom(1000) + b"\xff\xff\xff\x7fPAR1",
    "f.jsonl": lambda: b'{"id":' + b"[" * 900_000 + b"\n" + b'{"prompt":"a"}\n' * 1000,
}
_ARCHIVES: Final[Mapping[str, Callable[[], bytes]]] = {
    "a.jsonl.gz": lambda: gzip.compress(b"\n" * (64 * MIB)),
    "b.jsonl.gz": lambda: gzip.compress(b'{"prompt":"a"}\n' * (4 * MIB)),
    "c.jsonl.zst": lambda: zstd.compress(b'{"id":1}\n' * (7 * MIB)),
    "d.csv.zst": lambda: zstd.compress(b"prompt\n" + b"0" * (200 * MIB)),
    "e.jsonl.gz": lambda: gzip.compress(gzip.compress(b"0" * (64 * MIB)))[:-4],
}


async def tables(tenant: Tenant) -> None:
    """A table that is broken, deep, or whose rows are many times its bytes."""
    await _file(tenant, _TABLES)


async def archives(tenant: Tenant) -> None:
    """An archive that grows."""
    await _file(tenant, _ARCHIVES)


_FILES: Final[dict[str, bytes]] = {}


async def _file(tenant: Tenant, kinds: Mapping[str, Callable[[], bytes]]) -> None:
    name = tuple(kinds)[tenant.number % len(kinds)]
    if name not in _FILES:
        _FILES[name] = await asyncio.to_thread(kinds[name])
    await tenant.job(name, _FILES[name], jobs_pb2.JobSpec())


async def hooks(tenant: Tenant) -> None:
    """Three items, and a webhook that hangs."""
    spec = jobs_pb2.JobSpec(name="x" * 100)
    spec.webhook.url = f"http://127.0.0.1:{tenant.hook}/{tenant.number}"
    spec.webhook.secret = "whsec_" + "YWJj" * 8
    lines = (b'{"id":%d,"prompt":"%d","max_tokens":1}\n' % (at, tenant.number) for at in range(3))
    await tenant.job("a.jsonl", b"".join(lines), spec)


async def subjects(tenant: Tenant) -> None:
    """Names that mean something to NATS, to the file system or to this network."""
    names = ("*", ">", "a.>", "$JS.API.STREAM.DELETE.KV_SLUICE_JOBS", "$KV.SLUICE_API_KEYS.>", "a b\r\nPUB x 0",
             "../../etc/passwd", "_INBOX.jobs.>", "sluice.control", "$SYS.>")  # fmt: skip
    name = tenant.random.choice(names)
    urls = (
        "file:///etc/passwd",
        "http://169.254.169.254/",
        "s3://b/c",
        f"https://{name}/",
        "http://[::1]:4222/",
    )
    match tenant.number % 5:
        case 0:
            await tenant.create(jobs_pb2.JobSpec(model=MODEL, input={"nats_subject": name}))
        case 1:
            url = tenant.random.choice(urls)
            await tenant.create(jobs_pb2.JobSpec(model=MODEL, input={"url": url}))
        case 2:
            await tenant.jobs.GetJob(jobs_pb2.GetJobRequest(id=name), **tenant.limits)
        case 3:
            await tenant.read(asked(prompt="a", idempotency_key=name))
        case _:
            request = jobs_pb2.CreateJobRequest(
                spec=jobs_pb2.JobSpec(model=name, input={"upload_id": name}, labels={name: name}),
                idempotency_key=name,
            )
            await tenant.jobs.CreateJob(request, **tenant.limits)


async def watchers(tenant: Tenant) -> None:
    """A stream about a job that waits."""
    if not tenant.made:
        lines = b'{"id":"a","prompt":"a"}\n' * 2
        await tenant.job("a.jsonl", lines, jobs_pb2.JobSpec())
    job = tenant.made[0]
    limits: Any = {**tenant.limits, "timeout": 20.0}
    if tenant.number % 3 == 0:
        await tenant.jobs.ListJobs(jobs_pb2.ListJobsRequest(page_size=1000), **limits)
        return
    call = (
        tenant.jobs.WatchJob(jobs_pb2.WatchJobRequest(id=job), **limits)
        if tenant.number % 3 == 1
        else tenant.jobs.GetResults(jobs_pb2.GetResultsRequest(id=job, follow=True), **limits)
    )
    try:
        async for _ in call:
            await asyncio.sleep(1.0)
    finally:
        call.cancel()


async def vanished(tenant: Tenant) -> None:
    """Ends its connection after the first event."""
    other = Attacker(tenant.address, key=tenant.key)
    other.outcomes = tenant.outcomes
    await attacks.vanished(other)


async def bulk(tenant: Tenant) -> None:
    """A call that is not interactive."""
    kind = pb.PRIORITY_BULK if tenant.number % 2 else pb.PRIORITY_STANDARD
    await tenant.read(asked(prompt=f"bulk {tenant.number}", priority=kind))


def _headers(path: str, key: str, authority: str) -> bytes:
    """A block of HPACK with all names and values as they are."""
    fields = ((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", authority),
              ("te", "trailers"), ("content-type", "application/grpc"), ("authorization", f"Bearer {key}"))  # fmt: skip
    block = b""
    for name, value in fields:
        block += b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
    return block


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


async def _unfinished(tenant: Tenant, key: str, calls: int) -> None:
    """Calls over one connection whose messages are announced as 1 MB; 15 KB of each come, and then nothing."""
    host, _, port = tenant.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(PREFACE)
        path = "/sluice.v1.InferenceService/Generate"
        for stream in range(1, 2 * calls, 2):
            writer.write(_frame(1, 4, stream, _headers(path, key, tenant.address)))
            message = b"\0" + (1_000_000).to_bytes(4) + b"\n\xc0\x84\x3d" + b"x" * 15_000
            writer.write(_frame(0, 0, stream, message[:15_000]) if calls < 5 else b"")
        await writer.drain()
        async with asyncio.timeout(20.0):
            while await reader.read(65_536):
                pass
    finally:
        writer.close()


async def heads(tenant: Tenant) -> None:
    """With credentials, calls whose message never comes, or not to its end."""
    await _unfinished(tenant, tenant.key, 4 if tenant.number % 2 else 20)


async def anonymous(tenant: Tenant) -> None:
    """Without credentials: 1 MB, or calls that are never complete."""
    if tenant.number % 2:
        await _unfinished(tenant, "slc_" + "0" * 60, 4)
        return
    request = asked(prompt="x" * 1_000_000)
    call = tenant.calls.Generate(request, timeout=CALL_S)
    try:
        await call.read()
    finally:
        call.cancel()


async def http(tenant: Tenant) -> None:
    """A large, deep or endless body, or none of HTTP."""
    bodies = (
        b'{"model":"echo","messages":' + b"[" * 900_000,
        json.dumps({"model": "echo", "messages": [{"role": "user", "content": "a"}] * 20_000}),
        json.dumps({"model": "echo", "input": ["a"] * 100_000}),
        json.dumps({"model": "echo", "prompt": "x" * 900_000}),
    )
    body = bodies[tenant.number % len(bodies)]
    path = ("/v1/chat/completions", "/v1/embeddings", "/v1/completions")[tenant.number % 3]
    payload = body.encode() if isinstance(body, str) else body
    cut = len(payload) // 2 if tenant.number % 4 == 3 else None
    await _post(tenant, path, payload, sent=cut)


async def _post(
    tenant: Tenant,
    path: str,
    body: bytes,
    *,
    kind: str = "application/json",
    sent: int | None = None,
) -> None:
    """Sends ``body``, or the first ``sent`` bytes of it, and reads the answer for 20 s at most."""
    where = urlsplit(f"//{tenant.http}")
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {tenant.http}\r\nAuthorization: Bearer {tenant.key}\r\n"
        f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    try:
        writer.write(head.encode() + body[:sent])
        async with asyncio.timeout(20.0):
            status = await reader.readline()
            tenant.outcomes[f"status {status[9:12].decode() or 'none'}"] += 1
            while await reader.read(65_536):
                pass
    finally:
        writer.close()


async def keys(tenant: Tenant) -> None:
    """A credential that is none."""
    chosen = (
        "",
        "slc_" + uuid.uuid4().hex,
        "a." * 5000,
        "eyJhbGciOiJub25lIn0.e30.",
        tenant.key[:-1] + "!",
    )
    metadata = (("authorization", f"Bearer {tenant.random.choice(chosen)}"),)
    request = pb.CountTokensRequest(model=MODEL, prompt="a")
    await tenant.calls.CountTokens(request, timeout=CALL_S, metadata=metadata)


ATTACKS: Final[Mapping[str, tuple[float, Callable[[Tenant], Awaitable[None]]]]] = {
    "schemas": (1.0, schemas),
    "texts": (0.5, inspected),
    "megabyte": (0.5, megabyte),
    "audio": (0.5, audio),
    "tables": (0.1, tables),
    "archives": (0.1, archives),
    "webhooks": (0.5, hooks),
    "subjects": (1.0, subjects),
    "watchers": (2.0, watchers),
    "slow": (2.0, attacks.slow),
    "vanished": (2.0, vanished),
    "bulk": (10.0, bulk),
    "heads": (2.0, heads),
    "anonymous": (2.0, anonymous),
    "http": (1.0, http),
    "keys": (2.0, keys),
}
"""By kind, the calls that begin each second, and what a call does."""


async def _hook(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Never answers, or a byte a second."""
    drip: Iterator[int] = iter(b"HTTP/1.1 200 OK\r\nA: " + b"a" * 1000)
    with suppress(OSError, EOFError, asyncio.CancelledError):  # it is cancelled at the end
        asked = await reader.readline()
        for byte in drip:
            await asyncio.sleep(1.0)
            if int(asked.split()[1][1:]) % 2:
                writer.write(bytes((byte,)))
                await writer.drain()
    writer.close()


async def attack(
    address: str, http_address: str, seconds: float, keys_by: Mapping[str, str]
) -> dict[str, Outcomes]:
    """All kinds for ``seconds``; how their calls ended."""
    hook = await asyncio.start_server(_hook, "127.0.0.1", 0)
    port = hook.sockets[0].getsockname()[1]
    tenants = [Tenant(kind, address, http_address, keys_by[kind], port) for kind in ATTACKS]
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for tenant in tenants:
                per_s, attack_once = ATTACKS[tenant.kind]
                group.create_task(tenant.run(attack_once, per_s))
    for tenant in tenants:
        await asyncio.gather(*map(tenant.delete, tenant.made))
        await tenant.close()
    hook.close()
    return {tenant.kind: tenant.outcomes for tenant in tenants}


if __name__ == "__main__":
    os.nice(NICE)
    with suppress(OSError):  # where the kernel shares cores by session
        Path("/proc/self/autogroup").write_text(str(NICE), encoding="ascii")
    where, http_where, how_long = sys.argv[1:]
    given = json.loads(sys.stdin.readline())
    print(json.dumps(uvloop.run(attack(where, http_where, float(how_long), given))))
