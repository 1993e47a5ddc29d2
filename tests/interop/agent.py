"""A server of OpenAI's chats that uses every tool once, in turn, and then says what the last one returned."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from aiohttp import web

MODEL: Final = "agent"
TICKET: Final = {"topic": "refund", "urgent": True}
"""What it says where any JSON object is asked for."""
_VALUES: Final[Mapping[str, Any]] = {
    "string": "Oslo",
    "integer": 7,
    "number": 7,
    "boolean": True,
    "array": [],
    "object": {},
}


def reply_to(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the model says next: a delta."""
    turns: Sequence[Mapping[str, Any]] = body["messages"]
    last_asked = max(at for at, turn in enumerate(turns) if turn["role"] == "user")
    used = sum(len(turn.get("tool_calls") or ()) for turn in turns[last_asked:])
    tools = [tool["function"] for tool in body.get("tools") or ()]
    if used < len(tools):
        tool = tools[used]
        properties = tool.get("parameters", {}).get("properties", {})
        arguments = {name: _value(one) for name, one in properties.items()}
        function = {"name": tool["name"], "arguments": json.dumps(arguments)}
        return {"tool_calls": [{"index": 0, "function": function}]}
    shape = body.get("response_format", {"type": "text"})
    if shape["type"] == "json_object":
        return {"content": json.dumps(TICKET)}
    if shape["type"] == "json_schema":
        schema = shape["json_schema"]["schema"]
        said = {name: _value(one) for name, one in schema["properties"].items()}
        return {"content": json.dumps(said)}
    return {"content": f"You said: {turns[-1]['content']}"}


def _value(schema: Mapping[str, Any]) -> Any:
    return schema["enum"][0] if "enum" in schema else _VALUES[schema.get("type", "string")]


async def _answer(request: web.Request) -> web.StreamResponse:
    delta = reply_to(await request.json())
    finish = "tool_calls" if "tool_calls" in delta else "stop"
    usage = {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    events = (
        {"choices": [{"delta": delta}]},
        {"choices": [{"delta": {}, "finish_reason": finish}]},
        {"choices": [], "usage": usage},
    )
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": MODEL}]})


@asynccontextmanager
async def agent_server() -> AsyncIterator[str]:
    """Its URL while the block runs."""
    app = web.Application()
    app.router.add_get("/v1/models", _models)
    app.router.add_post("/v1/chat/completions", _answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/v1"
    finally:
        await runner.cleanup()
