"""Bodies in gzip are decoded within the limit of bodies; other encodings are refused with what to do."""

import gzip
import json
import zlib
from typing import Any

import pytest

from gateway.http.call import HttpCall
from gateway.http.encodings import EncodingUnsupported, gunzip
from sluice.errors import InvalidRequest, MessageTooLarge
from tests.gateway.kit.http import ask, chat
from tests.gateway.kit.wire import Wire

LIMIT = 1000


async def test_gzip_and_plain_bodies_are_read(http: Wire) -> None:
    wrong = json.dumps(chat(temperature=3)).encode()
    packed = gzip.compress(wrong)
    for name, body in (("gzip", packed), ("x-gzip", packed), ("GZIP", packed), ("identity", wrong)):
        reply = await ask(http.http, body=body, content_encoding=name)
        assert (reply.status, reply.error["param"]) == (400, "temperature"), name


async def test_other_encodings_are_415(http: Wire) -> None:
    for name in ("deflate", "br", "zstd", "gzip, gzip", "x" * 99):
        reply = await ask(http.http, body=zlib.compress(b"{}"), content_encoding=name)
        assert (reply.status, reply.error["code"]) == (415, "content_encoding_unsupported")
        assert reply.error["param"] == "content-encoding"
        assert reply.headers["accept-encoding"] == "gzip"
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
