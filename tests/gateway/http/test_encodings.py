"""Bodies in gzip are decoded within the limit of bodies; other encodings are refused with what to do."""

import asyncio
import gzip
import json
import zlib
from typing import Any

import pytest

from gateway.http.call import HttpCall
from gateway.http.encodings import EncodingUnsupported, gunzip
from sluice.errors import InvalidRequest, MessageTooLarge
from tests.gateway.kit.batcher import last
from tests.gateway.kit.http import ask, chat
from tests.gateway.kit.wire import Wire

LIMIT = 1000
WHOLE = json.dumps(chat()).encode()


@pytest.mark.parametrize("name", ["gzip", "x-gzip", "GZIP"])
async def test_a_gzip_body_is_decoded(http: Wire, name: str) -> None:
    asking = asyncio.ensure_future(ask(http.http, body=gzip.compress(WHOLE), content_encoding=name))
    task = await http.batcher.task()
    await http.batcher.send(task, last(0, http.tokens("hello")))
    assert (await asking).status == 200


async def test_a_body_that_is_sent_as_it_is_may_say_so(http: Wire) -> None:
    reply = await ask(http.http, body=chat(temperature=3), content_encoding="identity")
    assert reply.error["param"] == "temperature"


@pytest.mark.parametrize("name", ["deflate", "br", "zstd", "gzip, gzip", "x" * 99])
async def test_other_encodings_are_415(http: Wire, name: str) -> None:
    reply = await ask(http.http, body=zlib.compress(WHOLE), content_encoding=name)
    assert (reply.status, reply.error["code"]) == (415, "content_encoding_unsupported")
    assert (reply.error["param"], reply.headers["accept-encoding"]) == ("content-encoding", "gzip")
    assert "send gzip, or no encoding" in reply.error["message"]


def test_a_form_is_not_decoded() -> None:
    scope = {"type": "http", "path": "/v1/files", "headers": [(b"content-encoding", b"gzip")]}
    unused: Any = None
    with pytest.raises(EncodingUnsupported, match="content-encoding: gzip is served for JSON"):
        HttpCall(scope, unused, unused, 0, unused).pieces()


async def test_a_bomb_is_too_large(http: Wire) -> None:
    bomb = gzip.compress(b" " * 100_000_000)
    reply = await ask(http.http, body=bomb, content_encoding="gzip")
    assert (reply.status, reply.error["code"]) == (413, "message_too_large")


def test_the_limit_is_that_of_what_is_decoded() -> None:
    assert gunzip(gzip.compress(b"a" * LIMIT), LIMIT) == b"a" * LIMIT
    with pytest.raises(MessageTooLarge, match="the decoded body has more"):
        gunzip(gzip.compress(b"a" * (LIMIT + 1)), LIMIT)


WHOLE_MEMBER = gzip.compress(b"a")
BROKEN = {
    "empty": b"",
    "cut": WHOLE_MEMBER[:-3],
    "two": WHOLE_MEMBER * 2,
    "deflate": zlib.compress(b"a"),
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
def test_one_whole_member_is_read(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="content-encoding"):
        gunzip(body, LIMIT)
