"""`buf curl`, which learns the API from reflection alone."""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from google.rpc import error_details_pb2

from tests.interop.tools import Ran, run
from tests.support.mesh import RunningMesh

pytestmark = pytest.mark.mesh

SERVICE = "sluice.v1.InferenceService"


async def call(address: str, method: str, request: dict[str, Any]) -> Ran:
    return await run(
        Path(sys.executable).with_name("buf"),
        *("curl", "--protocol", "grpc", "--http2-prior-knowledge"),
        *("--data", json.dumps(request), f"http://{address}/{SERVICE}/{method}"),
    )


def objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects that stand one after the other in `text`."""
    decoder, found = json.JSONDecoder(), []
    while text := text.lstrip():
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


async def test_streams_an_answer(mesh: RunningMesh) -> None:
    request = {
        "prompt": "Sort ascending: 7, 3, 12",
        "model": "small",
        "sampling": {"maxTokens": 32},
    }
    ran = await call(mesh.address, "Generate", request)
    assert ran.code == 0, ran.err
    events = objects(ran.out)
    assert "started" in events[0]
    assert "finished" in events[-1]
    assert events[0]["started"]["model"] == "small"
    assert len(events[0]["started"]["traceId"]) == 32
    text = "".join(event["delta"].get("text", "") for event in events if "delta" in event)
    assert text == "3, 7, 12"
    usage = events[-1]["finished"]["usage"]
    count = sum(len(event["delta"]["tokenIds"]) for event in events if "delta" in event)
    assert usage["completionTokens"] == count


async def test_error_arrives_with_its_code_and_details(mesh: RunningMesh) -> None:
    ran = await call(mesh.address, "Generate", {"prompt": "hello", "model": "nobody"})
    assert ran.code != 0
    error = json.loads(ran.err)
    assert error["code"] == "not_found"
    assert "there are small, large" in error["message"]
    (detail,) = error["details"]
    assert detail["type"] == "google.rpc.ErrorInfo"
    info = error_details_pb2.ErrorInfo.FromString(base64.b64decode(detail["value"] + "=="))
    assert (info.domain, info.reason) == ("sluice", "MODEL_UNKNOWN")
