"""A body with too many entries of anything is refused for that, before any of them is looked at."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from gateway.http.responses import chat_of
from sluice.openai.embeddings import embed_request, rerank_request
from sluice.openai.fields import ENTRIES_MAX, BadField
from sluice.openai.requests import request_of_plain, set_tools
from sluice.v1 import inference_pb2 as pb

MANY: list[Any] = [None] * (ENTRIES_MAX + 1)
LABELS = dict.fromkeys(map(str, range(ENTRIES_MAX + 1)))


def plain(body: dict[str, Any]) -> pb.GenerateRequest:
    return request_of_plain(body, pb.GenerateRequest())


@pytest.mark.parametrize(
    ("read", "body", "field"),
    [
        (plain, {"messages": MANY}, "messages"),
        (plain, {"prompt": "a", "labels": LABELS}, "labels"),
        (plain, {"prompt": "a", "logit_bias": LABELS}, "logit_bias"),
        (partial(set_tools, pb.GenerateRequest()), {"tools": MANY}, "tools"),
        (plain, {"messages": [{"role": "user", "content": MANY}]}, "messages[0].content"),
        (embed_request, {"input": MANY}, "input"),
        (rerank_request, {"query": "a", "documents": MANY}, "documents"),
        (partial(chat_of, places={}), {"input": MANY}, "input"),
        (partial(chat_of, places={}), {"input": "a", "tools": MANY}, "tools"),
    ],
)
def test_it_is_refused(
    read: Callable[[dict[str, Any]], Any], body: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadField) as refused:
        read(body)
    assert str(refused.value) == f"{field}: has over {ENTRIES_MAX} entries; send fewer"
