"""`sluice record` against a real nats-server, and against the mesh."""

import asyncio
import json
from pathlib import Path

import nats
import pytest

from simulator.trace import parse_trace
from sluice.internal.v1 import control_pb2, frame_pb2, task_pb2
from sluice.settings import NatsSettings
from sluice.wire import subjects
from sluice.wire.codec import pack
from tests.cli.commands import BOUND_S, Cli

TASK = task_pb2.Task(
    request_id="a", model="small", priority_class="bulk", prompt_token_ids=[1, 2, 3]
)
ENDLESS = task_pb2.Task(request_id="b", priority_class="bulk", prompt_token_ids=[1])

CANCELLED = task_pb2.Task(
    request_id="c", model="first", priority_class="bulk", prompt_token_ids=[1, 2]
)
CANCEL = control_pb2.ControlMessage(
    cancel=control_pb2.Cancel(tasks=[frame_pb2.TaskRef(request_id="c")]), gateway="g1"
)


def final(request_id: str, tokens: int) -> frame_pb2.FrameBundle:
    frame = frame_pb2.Frame(request_id=request_id, token_ids=[1] * tokens)
    frame.final.end = frame_pb2.TASK_END_STOP
    return frame_pb2.FrameBundle(frames=[frame])


async def test_what_passes_on_nats_becomes_a_trace(cli: Cli, nats_url: str, tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    words = f"record --out {out} --seconds 1 --settle 0.2 --nats-url {nats_url} --json"
    recording = asyncio.create_task(cli(*words.split()))
    client = await nats.connect(nats_url)
    try:
        async with asyncio.timeout(BOUND_S):
            # Core NATS drops what nobody listens to yet: publish until the recorder has it.
            while not (out.exists() and out.read_text()):
                assert not recording.done(), recording.result()
                await client.publish(subjects.task_to("b1"), pack(ENDLESS))
                await client.publish(subjects.task_to("b1"), pack(TASK))
                await client.publish(subjects.task_to("b1"), b"nonsense\xff")
                await client.publish(subjects.frames("g1"), b"nonsense\xff")
                await client.publish(subjects.frames("g1"), pack(final("unknown", 2)))
                await client.publish(subjects.frames("g1"), pack(final("a", 5)))
                await client.publish(subjects.task_to("b1"), pack(CANCELLED))
                await client.publish(subjects.control_to("b1"), pack(CANCEL))
                await client.flush()
            ran = await recording
    finally:
        await client.close()
    assert ran.code == 0, ran.err
    done = json.loads(ran.out)
    arrivals = parse_trace(out.read_text().splitlines())
    assert done == {"out": str(out), "requests": len(arrivals), "unfinished": 1}
    assert {(a.prompt_tokens, a.answer_tokens, a.model) for a in arrivals} == {
        (3, 5, "small"),
        (2, 1, "first"),
    }


async def test_a_recording_of_nothing_is_a_failure(cli: Cli, nats_url: str, tmp_path: Path) -> None:
    out = str(tmp_path / "trace.jsonl")
    ran = await cli("record", "--out", out, "--seconds", "0.1", "--nats-url", nats_url)
    assert ran.code == 1
    assert "NOTHING_RECORDED" in ran.err


async def test_without_a_mesh_that_is_said(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NatsSettings, "connect_s", 0.3)
    out = str(tmp_path / "trace.jsonl")
    ran = await cli("record", "--out", out, "--state-dir", str(tmp_path / "state"))
    assert (ran.code, "NOT_READY" in ran.err) == (1, True)
    ran = await cli("record", "--out", out, "--nats-url", "nats://127.0.0.1:1")
    assert (ran.code, "NATS_UNREACHABLE" in ran.err) == (1, True)
