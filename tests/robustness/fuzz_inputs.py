"""What is fuzzed of inputs that are costly to read: constraints, tables, archives, audio, URLs that callers choose."""

import csv
import gzip
import io
import ipaddress
import json
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import Mock, patch

from backports import zstd

from gateway.admission.constraint_checks import ConstraintChecks
from gateway.models.speech import JoinedTexts, SpeechTokens, chunks_of
from gateway.validation.conversation import FieldViolations
from gateway.validation.speech import audio_of
from jobs import webhooks
from jobs.input import Format, Template, read_items
from jobs.outbound import Outbound, check_url
from sluice.constraints import problem_before
from sluice.errors import InternalError, SluiceError
from sluice.v1 import jobs_pb2
from sluice.v1.inference_pb2 import AudioFormat, GenerateRequest
from tests.robustness.mutator import Mutator

LOOP_S: Final = 0.5
"""Of the processor that a check on an event loop may take; a collection of garbage may be part of it."""
KINDS: Final = ("json_schema", "regex", "grammar")


def _typed(run: Callable[[], Any]) -> str:
    """What became of ``run``: an error of ours that is not our fault passes for an answer."""
    try:
        run()
    except InternalError:
        raise
    except SluiceError as error:
        return type(error).__name__
    return "taken"


# Constraints.

_SCHEMAS: Final[tuple[dict[str, Any], ...]] = (
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    {"type": "array", "items": {"type": "integer", "multipleOf": 3}, "minItems": 1, "maxItems": 9},
    {"anyOf": [{"type": "number", "minimum": 0, "exclusiveMaximum": 9.5}, {"type": "null"}]},
    {"type": "string", "pattern": "^[a-z]{1,9}$", "minLength": 1, "maxLength": 20},
    {"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
    {"oneOf": [{"const": 1}, {"enum": ["a", "b", None]}], "format": "date-time"},
    {"allOf": [{"multipleOf": 7}, {"multipleOf": 0.5}], "additionalProperties": False},
    {"patternProperties": {"^x": {"type": "string"}}, "propertyNames": {"pattern": "a+"}},
)
_PIECES: Final = (
    *("a", "(", ")", "[a-z]", "[^\\n]", ".", "*", "+", "?", "|", "{1,9}", "{0,1000}", "{32767}"),
    *("\\p{L}", "\\d", "\\w", "\\b", "^", "$", "(?i)", "(?=a)", "(?<n>a)", "\\1", "[", "\\", "é"),
    *("(?P<n>", "(?:", "[[:alpha:]]", "\\x{10ffff}", "\\u{1f600}", "&", "~", "{", "}", "\x00"),
)
_RULES: Final = (
    *("start: a\n", "a: /x{1,9}/\n", 'a: "x" | a "y"\n', "%ignore / /\n", "a: b~1..9\n"),
    *("A: /a/ & /b/\n", "A: ~/a/\n", '%json {"type":"object"}\n', "a[stop=/x/]: /y/\n", "%import"),
    *("start: %regex {}\n", "b: (a a)+\n", "%llguidance {}\n", "a: <[1-5]>\n", "start: start\n"),
)


def _schema(draw: Mutator) -> str:
    seed: Any = draw.changed_json(draw.random.choice(_SCHEMAS))
    for _ in range(draw.random.choice((0, 0, 1, 3, 400))):
        name = draw.random.choice(("items", "not", "properties", "allOf", "$defs", draw.text()))
        seed = {name: [seed] if name == "allOf" else seed}
    if draw.chance(0.02):
        seed = {draw.text() * 100: [seed] * draw.random.choice((10, 200))}
    try:
        text = json.dumps(seed)
    except RecursionError:
        text = '{"items":' * 5000
    return draw.bytes(text.encode()).decode(errors="replace") if draw.chance(0.3) else text


def _constraint(draw: Mutator) -> tuple[str, str]:
    kind = draw.random.choice(KINDS)
    if kind == "json_schema":
        return kind, _schema(draw)
    pieces = _PIECES if kind == "regex" else _RULES
    count = draw.random.choice((1, 4, 12, 12, 300))
    text = "".join(draw.random.choice(pieces) for _ in range(draw.random.randint(1, count)))
    if draw.chance(0.2):
        text = draw.bytes(text.encode()).decode(errors="replace")
    return kind, text


async def constraints(draw: Mutator) -> str:
    """What a gateway looks at on its event loop."""
    kind, text = _constraint(draw)
    begun = time.thread_time()
    problem = problem_before(kind, text)
    used_s = time.thread_time() - begun
    assert used_s < LOOP_S, f"{used_s:.2f} s for {len(text)} characters of a {kind}"
    return "taken" if problem is None else "refused"


class Compiled:
    """Constraints compiled in processes with limits, as a gateway does."""

    def __init__(self) -> None:
        self._checks = ConstraintChecks()

    async def constraint(self, draw: Mutator) -> str:
        """One constraint."""
        problem = await self._checks.problem(*_constraint(draw), "acme")
        if problem is None:
            return "taken"
        assert problem, "a refusal says why"
        return "over the limits" if problem.startswith("takes over") else "refused"

    async def close(self) -> None:
        """Ends the processes."""
        await self._checks.close()


# Tables and archives.

_LINES: Final[tuple[dict[str, Any], ...]] = (
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
     "body": {"model": "small", "messages": [{"role": "user", "content": "hi"}]}},
    {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"input": ["a", "b"]}},
    {"id": "b", "prompt": "hi", "max_tokens": 3},
    {"id": 3, "chat": [{"role": "user", "content": "hi"}]},
)  # fmt: skip
_TEMPLATES: Final = (
    "{prompt}",
    "{prompt} {{x}}",
    "{a}{b}",
    "{a.b}",
    "{0}",
    "{",
    "{a!r:9}",
    "{a[0]}",
)
LINE_BYTES: Final = 2_000


def _jsonl(draw: Mutator) -> bytes:
    lines = [draw.dumped(draw.changed_json(one)) for one in _LINES]
    return draw.random.choice((b"\n", b"\r\n", b"\n\n\n", b"\x00\n")).join(lines)


def _csv(draw: Mutator) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, quoting=draw.random.choice((csv.QUOTE_ALL, csv.QUOTE_MINIMAL)))
    writer.writerow(draw.random.choice((["id", "prompt"], ["a", "b"], ["prompt", "prompt"], [])))
    for _ in range(draw.random.randint(0, 5)):
        writer.writerow([draw.text() for _ in range(draw.random.choice((2, 2, 2, 1, 9)))])
    return text.getvalue().encode(errors="surrogatepass")


def _archived(draw: Mutator, data: bytes) -> bytes:
    """``data``, compressed or nearly so, in one member or in several, in itself, or with what grows."""
    if draw.chance(0.0005):
        data += b"\n" * (80 << 20)  # a few hundred KiB become 80 MiB
    kinds = (gzip.compress, zstd.compress, bytes)
    for _ in range(draw.random.choice((1, 1, 1, 2))):
        half = draw.random.randint(0, len(data)) if draw.chance(0.2) else len(data)
        kind = draw.random.choice(kinds)
        data = kind(data[:half]) + (kind(data[half:]) if half < len(data) else b"")
    return draw.bytes(data) if draw.chance(0.4) else data


def _pieces(draw: Mutator, data: bytes) -> list[bytes]:
    size = draw.random.choice((1 + len(data) // 100, 100, 1 << 16))
    return [data[at : at + size] for at in range(0, len(data), size)] + [b""]


def _read(draw: Mutator, data: bytes, format: Format) -> None:
    template = Template(draw.random.choice(_TEMPLATES)) if draw.chance(0.3) else None
    items = read_items(
        iter(_pieces(draw, data)),
        format,
        template,
        id_field=draw.text() if draw.chance(0.1) else "",
        line_bytes_max=LINE_BYTES,
        skipped=draw.random.choice((0, 0, 2)),
    )
    for item in items:
        assert item.line > 0


async def tables(draw: Mutator) -> str:
    """A file of a job as lines or as CSV, plain or in an archive."""
    data = draw.random.choice((_jsonl, _csv))(draw)
    if draw.chance(0.5):
        data = _archived(draw, data)
    formats = [one for one in Format if one is not Format.PARQUET]
    if data.startswith(b"PAR1"):
        return "parquet"
    return _typed(lambda: _read(draw, data, draw.random.choice(formats)))


@cache
def _parquets() -> tuple[bytes, ...]:
    """Files with columns of many types and encodings."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = 40
    plain = {
        "prompt": [f"row {at}" for at in range(rows)],
        "id": list(range(rows)),
        "a": [None, "x"] * (rows // 2),
        "b": [b"\xff\x00"] * rows,
        "list": [[1, 2], []] * (rows // 2),
        "struct": [{"x": 1.5, "y": None}] * rows,
    }
    files = []
    for name in ("snappy", "gzip", "zstd", "none"):
        for dictionary in (True, False):
            file = io.BytesIO()
            pq.write_table(
                pa.table(plain),
                file,
                compression=name,
                use_dictionary=dictionary,
                row_group_size=16,
            )
            files.append(file.getvalue())
    large = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["x" * 500_000] * 200}), large)  # one value in many rows
    return (*files, large.getvalue())


async def parquet(draw: Mutator) -> str:
    """A Parquet file; each is read by a process of its own."""
    data = draw.random.choice(_parquets())
    if draw.chance(0.8):
        data = draw.bytes(data)
    if draw.chance(0.5):  # the directory stands at the end
        data = data[:-200] + draw.bytes(data[-200:])
    return _typed(lambda: _read(draw, data, Format.PARQUET))


# Audio.

_TOKENS: Final = SpeechTokens(
    start=1, languages={"en": 2, "de": 3}, tasks={"transcribe": 4, "translate": 5}, forced=(),
    no_timestamps=6, previous=7, previous_max=20, chunk_s=0.1, control=frozenset(range(8)),
)  # fmt: skip


class _Catalog:
    """One model that takes audio."""

    hearing = ("whisper",)
    answering = callable = ("small", "whisper")

    def __getitem__(self, _: str) -> Any:
        return SimpleNamespace(tokenizer=SimpleNamespace(speech=_TOKENS))


def _chunk(name: bytes, data: bytes) -> bytes:
    return name + len(data).to_bytes(4, "little") + data


def _wav(draw: Mutator) -> bytes:
    form = b"\x01\x00\x01\x00\x80\x3e\x00\x00\x00\x7d\x00\x00\x02\x00\x10\x00"
    chunks = [_chunk(b"fmt ", form), _chunk(b"data", bytes(draw.random.choice((2, 99, 9000))))]
    for _ in range(draw.random.choice((0, 0, 1, 300))):
        chunks.insert(draw.random.randint(0, 2), _chunk(b"LIST", draw.text().encode()))
    return b"RIFF\xff\xff\xff\xffWAVE" + b"".join(chunks)


async def audio(draw: Mutator) -> str:
    """A request with audio, its samples cut into chunks, and the texts of these joined."""
    request = draw.filled(GenerateRequest, 0.1)
    request.audio.data = draw.bytes(_wav(draw)) if draw.chance(0.7) else _wav(draw)
    request.audio.format = draw.random.choice(AudioFormat.values())
    if draw.chance(0.8):
        request.model, request.raw_prompt = "", False
        request.ClearField("tools")
        request.sampling.Clear()
    return _typed(lambda: _heard(draw, request))


def _heard(draw: Mutator, request: GenerateRequest) -> None:
    catalog: Any = _Catalog()
    found = FieldViolations()
    valid, _ = audio_of(request, catalog, 30.0, found)
    found.raise_any()
    chunks = list(chunks_of(valid.pcm, _TOKENS.chunk_s))
    assert b"".join(chunks[:1])[:100] == valid.pcm[: len(chunks[0])][:100]
    _TOKENS.begin(valid.language, translate=valid.translate, before=[9] * draw.number(0, 50))
    joined, count = JoinedTexts(), 0
    for _ in chunks[:8]:
        said = [draw.random.randrange(4) for _ in range(draw.random.randint(0, 40))]
        count += len(joined.add(said))
    joined.end()


# URLs.

_ADDRESSES: Final = (
    *("93.184.216.34", "2606:2800:220:1::1", "127.0.0.1", "10.1.2.3", "169.254.169.254", "0.0.0.0"),
    *("::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "fe80::1%eth0", "fd00::1", "2002:7f00:1::"),
    *("100.64.0.1", "192.0.0.8", "224.0.0.1", "255.255.255.255", "198.18.0.1", "::", "ff02::1"),
)
_PUBLIC: Final = frozenset(_ADDRESSES[:2])
_LISTED: Final = ("hooks.internal", "10.1.0.0/16")
_URLS: Final = (
    *("https://example.org/hook", "http://hooks.internal/x?y=1", "https://example.org:8443/a/../b"),
    *("https://[::1]/", "http://127.0.0.1:80/", "https://user:pass@example.org/", "HTTPS://EX.ORG"),
    *(
        "https://example.org:99999/",
        "https://a..b/",
        "https://" + "a" * 70 + ".org/",
        "s3://p/in/x",
    ),
    *(
        "file:///srv/a.jsonl",
        "file:///srv/../etc/passwd",
        "https://ex.org/in/%2e%2e/x",
        "//x/y",
        "::",
    ),
    *("https://example.org/in/a.jsonl", "file:///srv/%2e%2e/x", "zip://a::s3://p/in/x", "data:,x"),
)
_PREFIXES: Final = ("file:///srv/", "https://example.org/in", "s3://p/in/")
_ANSWER: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\nX: y\r\n\r\n",
    b"HTTP/1.0 302 Found\r\nLocation: http://127.0.0.1/\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"HTTP/1.1 410 Gone\r\n" + b"a: b\r\n" * 120 + b"\r\n",
)


@contextmanager
def _answering(answer: bytes, reached: list[str]) -> Any:
    def connect(to: tuple[str, int], *_: Any) -> Any:
        """A socket of a server that has answered already."""
        reached.append(to[0])
        return Mock(makefile=lambda *_, **__: io.BytesIO(answer))

    context = SimpleNamespace(
        verify_mode=ssl.CERT_REQUIRED, check_hostname=True, wrap_socket=lambda one, **_: one
    )
    with (
        patch("jobs.outbound.socket.create_connection", connect),
        patch("jobs.outbound.ssl.create_default_context", lambda: context),
    ):
        yield


def _resolver(draw: Mutator) -> Callable[[str, int], Sequence[str]]:
    def resolve(host: str, _: int) -> list[str]:
        host.encode("idna")  # as socket.getaddrinfo
        if draw.chance(0.1):
            raise OSError("no such host")
        with_port = draw.random.choices(_ADDRESSES, k=draw.random.randint(1, 3))
        return with_port if draw.chance(0.7) else [draw.random.choice(tuple(_PUBLIC))]

    return resolve


async def urls(draw: Mutator) -> str:
    """A webhook, and the URL of an input: where they lead, and what the server there answers."""
    url = draw.random.choice(_URLS)
    if draw.chance(0.5):
        url = draw.bytes(url.encode()).decode(errors="replace")
    kind = draw.random.choice((_webhook, _posted, _input))
    return _typed(lambda: kind(draw, url))


def _webhook(draw: Mutator, url: str) -> None:
    secret = draw.text() if draw.chance(0.5) else "whsec_" + draw.text() * 3
    job = draw.filled(jobs_pb2.Job, 0.3)
    event = webhooks.event_of(job, draw.number(0, 9))
    webhooks.check(jobs_pb2.JobWebhook(url=url, secret=secret), Outbound(_LISTED, _resolver(draw)))
    if event is not None:
        for name, value in event.headers(secret, 1).items():
            assert (name + value).isprintable(), "a header is one line"


def _posted(draw: Mutator, url: str) -> None:
    answer = draw.random.choice(_ANSWER)
    reached: list[str] = []
    outbound = Outbound(_LISTED, _resolver(draw))
    with _answering(draw.bytes(answer) if draw.chance(0.7) else answer, reached):
        try:
            if draw.chance(0.5):
                outbound.post(url, {"webhook-id": "evt"}, b"{}", webhooks.FIELD)
            else:
                for _ in outbound.read(url, "spec.input.url"):
                    pass
        finally:
            _check_reached(url, reached)


def _check_reached(url: str, reached: Sequence[str]) -> None:
    for address in reached:
        found = ipaddress.ip_address(address.partition("%")[0])
        listed = "hooks.internal" in url.lower() or found in ipaddress.ip_network("10.1.0.0/16")
        assert address in _PUBLIC or listed, f"{url} led to {address}"


def _input(_: Mutator, url: str) -> None:
    check_url(url, _PREFIXES)
    assert ".." not in url.split("?")[0].split("/"), url
    assert any(url.startswith(prefix.rstrip("/") + "/") for prefix in _PREFIXES), url
