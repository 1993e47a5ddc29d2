"""Asks a server for the answer to one sequence, and retries where that is safe.

A worker retries a request only before its first token, and only if the server was unreachable, failed, or refused it
for now. Later failures are returned to the batcher, which sends the sequence with its tokens to a worker again.
"""

import asyncio
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final, Self
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp.http import HttpProcessingError

from model_workers.engine.protocol import SequenceEnd, SequenceSpec, TokenLogprobs
from model_workers.remote.api import TOKEN_CHARS_MAX, Chunk, ServerApi, ServerToken, ServerUsage
from model_workers.remote.calls import CallText
from model_workers.remote.faults import Retry, ServerFault, fault_of_status
from model_workers.remote.health import ServerHealth
from model_workers.remote.key import read_key
from model_workers.remote.limits import Gate, retry_after_s
from sluice.errors import EngineFailed, InvalidRequest, ModelUnavailable, Overloaded
from sluice.telemetry.tracing import TRACEPARENT
from sluice.wire.text_tokens import REASONING, REASONING_END, TextTokens, without_marks

logger = logging.getLogger(__name__)

TRIES: Final = 3
"""Maximum number of requests to a failing server; one that has failed as often for others gets one."""
CONNECT_S: Final = 5.0
"""Timeout of a connection with its TLS, in seconds."""
IDLE_S: Final = 4.0
"""How long an unused connection is kept, in seconds: less than uvicorn keeps it, so that no request meets its end."""
LIST_S: Final = 5.0
"""Timeout of listing the server's models, in seconds."""
END_S: Final = 0.05
"""How long the end of a complete stream may take, in seconds, before its connection is closed."""
EVENT: Final = b"data:"
"""Begins the lines of a stream of server-sent events that are read; each is an event."""
DONE: Final = b"[DONE]"
EVENT_BYTES_MAX: Final = 4 * 1024 * 1024
"""Maximum size of an event and of the list of models; a longer one is no answer."""
ERROR_BYTES_MAX: Final = 64 * 1024
EARLY_S: Final = 0.002
"""How early a timer of the event loop may be, in seconds."""

NO_LOGPROBS: Final = TokenLogprobs(0.0, text="")
"""Entry of tokens that are not the last one of the server's token, with probability 1.

So sums are right, and without these entries the rest is what the server sent.
"""

_UNREACHABLE: Final = (
    aiohttp.ClientConnectorError,
    aiohttp.ConnectionTimeoutError,
    aiohttp.ClientHttpProxyError,
)
_JSON: Final = json.JSONEncoder(ensure_ascii=False)

Emit = Callable[[tuple[int, ...], tuple[TokenLogprobs, ...]], None]
"""Receives the next tokens of an answer."""


Answered = tuple[SequenceEnd, ServerUsage | None]
"""How an answer ended, and what the server counted."""


class ServerClient:
    """A client of one server.

    Attributes:
        api: The API that the server speaks.
        gate: When the server may be called.
        health: Whether the server responds at all.
        url: Base URL of its API.
    """

    def __init__(
        self, api: ServerApi, url: str, on_gate: Callable[[], None] = lambda: None
    ) -> None:
        """Create a client; `on_gate` is called when the gate closes or opens, and when the server's health changes."""
        self.url = url.rstrip("/")
        self.gate = Gate()
        self.health = ServerHealth(self.url, self._list_models, on_gate)
        self.api = api
        self._settings = api.settings
        self._on_gate = on_gate
        self._has_warned = False
        """Whether it was logged that the server does not have the model."""

    async def __aenter__(self) -> Self:
        """Return the client; connections open when they are needed."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=IDLE_S, ssl=ssl.create_default_context()
            ),
            timeout=aiohttp.ClientTimeout(connect=CONNECT_S, sock_read=self._settings.stall_s),
            # Compression would delay events until a block of it is full.
            headers={"Accept-Encoding": "identity", "Content-Type": "application/json"},
            cookie_jar=aiohttp.DummyCookieJar(),
            proxy=proxy_of(self.url),
            read_bufsize=EVENT_BYTES_MAX // 2,  # a line has at most twice as many bytes
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._session.close()

    async def answer(self, spec: SequenceSpec, emit: Emit) -> Answered:
        """Request the answer to a sequence and emit its tokens; return how it ended.

        Raises:
            ServerFault: It is not available here, or not now.
        """
        if self.api.is_whole(spec):
            return SequenceEnd.LENGTH, None
        if self.health.problem:
            raise ServerFault(self.health.problem, ModelUnavailable)
        tries = 0
        while True:
            await self._until_open(spec.deadline)
            known_text, with_logprobs = self.api.known_text(spec), spec.sampling.logprobs
            reading = _Reading(self.api.tokens, known_text, emit, with_logprobs=with_logprobs)
            try:
                return await self._request_answer(spec, reading)
            except ServerFault as fault:
                self._note(fault)
                if fault.kind not in (InvalidRequest, Overloaded):
                    self.health.doubt(fault.message)
                tries += fault.retry is Retry.SOON
                spent = tries and max(tries, self.gate.failures) >= TRIES
                if spent and not reading.emitted and fault.kind is EngineFailed:
                    fault.kind = ModelUnavailable  # nothing of an answer came
                if fault.retry is Retry.NEVER or reading.emitted or spent:
                    raise

    async def _list_models(self) -> None:
        """Check which models the server has.

        Raises:
            ServerFault: It does not list them.
        """
        try:
            async with asyncio.timeout(LIST_S), self._response("GET", "/models") as response:
                listed = await _read_up_to(response, EVENT_BYTES_MAX + 1)
        except TimeoutError:
            raise ServerFault(f"the server said nothing for {LIST_S:g} s") from None
        if len(listed) > EVENT_BYTES_MAX:
            raise ServerFault("the server's list of models has no end")
        names = _model_names(listed)
        if names and self._settings.model not in names and not self._has_warned:
            self._has_warned = True
            logger.warning("%s has no model %r; it has %s", self.url, self._settings.model, names)

    def _note(self, fault: ServerFault) -> None:
        now = time.monotonic()
        if fault.retry is Retry.WHEN_ALLOWED:
            self.gate.limited(fault.retry_after_s, now)
        elif fault.retry is Retry.SOON:
            self.gate.failed(now)
        self._report_gate()

    def _report_gate(self) -> None:
        """Report when the gate has closed, and when it opens again."""
        wait_s = self.gate.open_at - time.monotonic()
        if wait_s > 0:
            self._on_gate()
            asyncio.get_running_loop().call_later(wait_s + EARLY_S, self._on_gate)

    async def _until_open(self, deadline: float | None) -> None:
        while (wait_s := self.gate.open_at - time.monotonic()) > 0:
            if deadline is not None and self.gate.open_at >= deadline:
                raise ServerFault(
                    f"the server takes no request for another {wait_s:.1f} s",
                    Overloaded,
                    Retry.NEVER,
                    retry_after_s=self.gate.free_at - time.monotonic(),
                )
            await asyncio.sleep(wait_s)

    async def _request_answer(self, spec: SequenceSpec, reading: "_Reading") -> Answered:
        body = _JSON.encode(self.api.body(spec)).encode(errors="replace")
        async with self._response("POST", self.api.path, body, spec.traceparent) as response:
            # A list proves nothing of requests, but this does.
            self.gate.answered(response.headers, time.monotonic())
            self._report_gate()
            async for line in response.content:
                data = line.removeprefix(EVENT).strip()
                if data == DONE:
                    # Read to the end, so that the connection serves the next request.
                    with suppress(TimeoutError):
                        async with asyncio.timeout(END_S):
                            await response.content.read()
                    break
                if line.startswith(EVENT):
                    reading.take(self.api.chunk(data.decode(errors="replace")))
        return reading.answered()

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, body: bytes | None = None, traceparent: str = ""
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; yield the successful response when its head has arrived.

        Raises:
            ServerFault: There is none, its status says why, or the connection breaks within the block.
        """
        key = read_key(self._settings)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        if traceparent:
            headers[TRACEPARENT] = traceparent
        # Redirects are refused: key and prompt go where the settings say.
        request = self._session.request(
            method, self.url + path, data=body, headers=headers, allow_redirects=False
        )
        with _faults(self._settings.stall_s):
            async with request as response:
                if response.status != 200:
                    details = await _read_up_to(response, ERROR_BYTES_MAX)
                    wait_s = retry_after_s(response.headers, time.time())
                    raise fault_of_status(response.status, details, wait_s)
                yield response


def proxy_of(url: str) -> str | None:
    """Return the proxy by HTTPS_PROXY, HTTP_PROXY and NO_PROXY; None: the server is called directly."""
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme)
    if not proxy or proxy_bypass(parts.hostname or ""):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


@contextmanager
def _faults(stall_s: float) -> Iterator[None]:
    """Turn broken connections and invalid answers into a `ServerFault`."""
    try:
        yield
    except _UNREACHABLE as error:
        raise ServerFault("the server cannot be reached", ModelUnavailable) from error
    except aiohttp.SocketTimeoutError as error:
        raise ServerFault(f"the server said nothing for {stall_s:g} s") from error
    except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError) as error:
        kind = type(error).__name__
        raise ServerFault(f"the connection to the server broke ({kind})") from error


async def _read_up_to(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """Return the body, or its first part if it is longer than `limit_bytes`."""
    body = bytearray()
    while len(body) < limit_bytes and (received := await response.content.readany()):
        body += received
    return bytes(body)


def _model_names(listed: bytes) -> list[str]:
    """Return the names of a list of models; not every server has a list of this form."""
    try:
        return [str(model["id"]) for model in json.loads(listed)["data"]]
    except (ValueError, TypeError, LookupError):
        return []


class _Reading:
    """The answer to one sequence while it arrives.

    Attributes:
        emitted: Whether there were tokens.
    """

    def __init__(
        self, tokens: TextTokens | None, known_text: str, emit: Emit, *, with_logprobs: bool
    ) -> None:
        """Create a reading; `known_text` is the text that the caller has, which the server repeats."""
        self.emitted = False
        self._tokens = tokens
        self._emit = emit
        self._end: SequenceEnd | None = None
        self._usage: ServerUsage | None = None
        self._known_text = known_text
        self._with_logprobs = with_logprobs
        self._has_logprobs = False
        self._reasons = False
        """Whether the newest text is reasoning."""
        self._calls = CallText()

    def take(self, chunk: Chunk) -> None:
        """Process a chunk.

        Raises:
            ServerFault: It is not what was requested, or differs from what was sent before.
        """
        token_ids, logprobs = chunk.token_ids, chunk.logprobs
        if text := self._text(chunk):
            token_ids, logprobs = self._as_tokens(text, chunk)
        if token_ids:
            self.emitted = True
            self._emit(token_ids, logprobs)
        self._end = chunk.end or self._end
        self._usage = chunk.usage or self._usage

    def _as_tokens(
        self, chunk_text: str, chunk: Chunk
    ) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
        assert self._tokens is not None, "text needs them"
        if not self._with_logprobs:
            return tuple(self._tokens.encode(self._without_known(chunk_text))), ()
        self._has_logprobs |= bool(chunk.server_tokens)
        if chunk.text and not self._has_logprobs:
            raise ServerFault(
                "the server gives no log-probabilities: leave them out, or set "
                "parameters.logprobs of the model to null",
                InvalidRequest,
                Retry.NEVER,
            )
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for text, entry in pieces_of(chunk_text, chunk.server_tokens):
            own = self._tokens.encode(self._without_known(text))
            token_ids += own
            logprobs += [*[NO_LOGPROBS] * (len(own) - 1), entry][-len(own) :] if own else []
        return tuple(token_ids), tuple(logprobs)

    def answered(self) -> Answered:
        """Return how the answer ended.

        Raises:
            ServerFault: It did not.
        """
        if self._end is None:
            raise ServerFault("the server cut the answer off")
        if self._known_text:
            raise _differs()
        return self._end, self._usage

    def _text(self, chunk: Chunk) -> str:
        if chunk.text and not (chunk.calls or chunk.reasoning or chunk.end or self._reasons):
            return without_marks(chunk.text)  # nearly every event
        calls = ""
        if chunk.calls:
            try:
                calls = self._calls.push(chunk.calls)
            except (TypeError, AttributeError) as error:
                raise ServerFault("the server sent a tool call that is none of its API") from error
        if chunk.end is not None:
            calls += self._calls.close()
        return self._marked(without_marks(chunk.reasoning), without_marks(chunk.text + calls))

    def _marked(self, reasoning: str, text: str) -> str:
        """Return reasoning and text as one text."""
        reasoning_text = reasoning
        if reasoning and not self._reasons:
            reasoning_text, self._reasons = REASONING + reasoning, True
        if text and self._reasons:
            reasoning_text, self._reasons = reasoning_text + REASONING_END, False
        return reasoning_text + text

    def _without_known(self, text: str) -> str:
        """Return `text` without what the caller has from an earlier attempt."""
        known_text = self._known_text[: len(text)]
        if not text.startswith(known_text):
            raise _differs()
        self._known_text = self._known_text[len(text) :]
        return text[len(known_text) :]


def pieces_of(
    chunk_text: str, tokens: Sequence[ServerToken]
) -> Iterator[tuple[str, TokenLogprobs]]:
    """Split `chunk_text` by the `tokens` that it was sent with.

    Tokens that are no whole characters are one piece, with the sum of their log-probabilities. So is the whole text if
    it is not the text of its tokens, as where the server made tool calls of it.
    """
    if chunk_text[0] in (REASONING, REASONING_END):
        yield chunk_text[0], NO_LOGPROBS
        chunk_text = chunk_text[1:]
    pieces = list(_whole_characters(chunk_text, tokens))
    if "".join(text for text, _ in pieces) == chunk_text:
        yield from pieces
    elif chunk_text:
        total = sum(token.logprob for token in tokens)
        has_entry = tokens and len(chunk_text) <= TOKEN_CHARS_MAX
        yield chunk_text, TokenLogprobs(total, text=chunk_text) if has_entry else NO_LOGPROBS


def _whole_characters(
    chunk_text: str, tokens: Sequence[ServerToken]
) -> Iterator[tuple[str, TokenLogprobs]]:
    """Yield whole characters up to the end of `chunk_text`: a token without text ends an answer."""
    pending, total, remaining = b"", 0.0, len(chunk_text)
    for token in tokens:
        # A character may take several tokens: collect bytes until they decode.
        alone, pending, total = not pending, pending + token.data, total + token.logprob
        try:
            text = pending.decode()
        except UnicodeDecodeError:
            continue
        if not text or remaining <= 0 or len(text) > TOKEN_CHARS_MAX:
            continue
        yield text, TokenLogprobs(total, text=text, top_texts=token.top if alone else ())
        pending, total, remaining = b"", 0.0, remaining - len(text)


def _differs() -> ServerFault:
    return ServerFault(
        "the answer was lost after its first tokens, and the server begins another one now",
        retry=Retry.NEVER,
    )
