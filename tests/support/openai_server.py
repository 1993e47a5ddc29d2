"""A server of OpenAI's API that answers by a rule, and misbehaves on demand: a real HTTP server without a model."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

WAIT_S = 60.0
WORDS = ("naïve ", "café", " 中文", "😀", "\n", "<|im_end|>", " e\u0301", "ﬁ", " the", " end.")

CALL_PIECES = (
    (0, "look_up", ""),
    (0, "", '{"city": "K'),
    (0, "", 'öln"}'),
    (1, "look_up", '{"city": "Rome"}'),
    (2, "now", ""),
)
"""Of the tool calls of an answer: number, name and a piece of the arguments."""

THOUGHTS: Sequence[Mapping[str, Any]] = (
    {"role": "assistant", "content": ""},
    {"reasoning_content": "Hm, "},
    {"reasoning_content": "7?"},
    {"content": "It is\x0e odd."},
    {"reasoning": " Or not?"},
    {"content": " Yes."},
)
"""An answer with reasoning, of a server that thinks again in the middle; asked for with "think"."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request, after a number of events."""

    kind: Literal["status", "cut", "stall", "rubbish", "endless", "error", "silence"]
    after: int = 0
    status: int = 500
    headers: Mapping[str, str] = field(default_factory=dict)


def next_token(context: Sequence[int]) -> int:
    """The rule: every token depends on all before it."""
    return (31 * len(context) + 17 * context[-1] + sum(context)) % 900 + 10


def answer_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """The whole answer."""
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context))
    return context[len(prompt) :]


def answer_words(messages: Sequence[Mapping[str, Any]], count: int) -> list[str]:
    """The whole answer in pieces."""
    first = len(messages[-1]["content"])
    return [WORDS[(first + index) % len(WORDS)] for index in range(count)]


@dataclass
class OpenAIServer:
    """The server and what it saw.

    Attributes:
        model: its only one.
        faults: of the next requests, one each; None: that one is answered.
        requests: their bodies.
        authorizations, traceparents: headers of the same.
        headers: of answers.
        key: that requests for the list must show; empty: none.
        list_status: of the list of models.
        pause_s: before every event.
        gone: requests whose client closed them.
        active: requests in progress, and ``most`` of them at the same time.
    """

    url: str = ""
    model: str = "m"
    faults: deque[Fault | None] = field(default_factory=deque)
    requests: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)
    traceparents: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    key: str = ""
    list_status: int = 200
    pause_s: float = 0.0
    gone: int = 0
    active: int = 0
    most: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def until(self, condition: Any) -> None:
        """Returns when ``condition`` holds."""
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(condition)

    async def _note(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def models(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"type": "invalid_key"}}, status=401)
        return web.json_response({"data": [{"id": self.model}]}, status=self.list_status)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.authorizations.append(request.headers.get("Authorization", ""))
        self.traceparents.append(request.headers.get("traceparent", ""))
        fault = self.faults.popleft() if self.faults else None
        self.active += 1
        self.most = max(self.most, self.active)
        await self._note()
        try:
            return await self._answer(request, body, fault)
        except (asyncio.CancelledError, ConnectionError):
            self.gone += 1
            raise
        finally:
            self.active -= 1
            await asyncio.shield(self._note())

    async def _answer(
        self, request: web.Request, body: dict[str, Any], fault: Fault | None
    ) -> web.StreamResponse:
        if fault is not None and fault.kind == "status":
            error = {"error": {"type": "oops", "message": f"you said {body}"}}
            return web.json_response(error, status=fault.status, headers=fault.headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **self.headers})
        await response.prepare(request)
        for index, event in enumerate(_events(body)):
            if fault is not None and index == fault.after:
                await self._misbehave(fault, request, response)
                return response
            await asyncio.sleep(self.pause_s)
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b": a comment\r\n\r\ndata: [DONE]\n\n")
        return response

    async def _misbehave(
        self, fault: Fault, request: web.Request, response: web.StreamResponse
    ) -> None:
        if fault.kind == "rubbish":
            await response.write(b"data: <html>no</html>\n\n")
        elif fault.kind == "endless":
            await response.write(b"data: " + b" " * 5_000_000)
        elif fault.kind == "error":
            await response.write(b'data: {"error": {"code": "out_of_memory"}}\n\n')
        elif fault.kind == "stall":
            await asyncio.sleep(WAIT_S)
        elif fault.kind == "cut":
            assert request.transport is not None
            request.transport.abort()


def call_piece(piece: tuple[int, str, str]) -> dict[str, Any]:
    index, name, arguments = piece
    function = {"arguments": arguments, **({"name": name} if name else {})}
    return {"delta": {"tool_calls": [{"index": index, "function": function}]}}


def tokens_of(delta: Mapping[str, Any], alternatives: int) -> list[dict[str, Any]]:
    """The tokens of a piece, by bytes: two, the second of which may begin inside a character."""
    data = str(delta.get("content") or delta.get("reasoning_content") or "").encode()
    parts = [part for part in (data[:2], data[2:]) if part]
    top = [{"token": f"t{n}", "logprob": -1.0 - n} for n in range(alternatives)]
    return [
        {
            "token": part.decode(errors="replace"),
            "bytes": list(part),
            "logprob": -0.25,
            "top_logprobs": top,
        }
        for part in parts
    ]


def _events(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    count = body.get("max_tokens", 12)
    choices: list[dict[str, Any]]
    if "tools" in body and body["messages"][-1]["role"] == "user":
        choices = [{"delta": {"content": "Let me see."}}, *map(call_piece, CALL_PIECES)]
    elif "messages" in body and "think" in body["messages"][-1]["content"]:
        choices = [{"delta": delta} for delta in THOUGHTS]
    elif "messages" in body:
        choices = [{"delta": {"content": word}} for word in answer_words(body["messages"], count)]
    elif body.get("return_token_ids"):
        choices = [{"text": "?", "token_ids": [t]} for t in answer_tokens(body["prompt"], count)]
    else:
        choices = [{"text": WORDS[len(body["prompt"]) % len(WORDS)]} for _ in range(count)]
    end = (
        "length"
        if "delta" not in choices[-1] or "content" in choices[-1]["delta"]
        else "tool_calls"
    )
    if body.get("logprobs") is True and "mute" not in body["messages"][-1]["content"]:
        for choice in choices:
            choice["logprobs"] = {"content": tokens_of(choice["delta"], body["top_logprobs"])}
    choices.append({"delta": {}, "text": "", "finish_reason": end})
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": count,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    return [{"choices": [choice]} for choice in choices] + [{"choices": [], "usage": usage}]


@asynccontextmanager
async def openai_server(port: int = 0) -> AsyncIterator[OpenAIServer]:
    """A server on this loop while the block runs."""
    server = OpenAIServer()
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.answer)
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    assert site._server is not None
    host, port = site._server.sockets[0].getsockname()[:2]  # type: ignore[attr-defined]
    server.url = f"http://{host}:{port}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()
