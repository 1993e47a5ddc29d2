"""`sluice record`: writes the traffic of a running mesh as a trace for `sluice simulate`."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from typer import Option

from cli import failure, options, output
from sluice.internal.v1.control_pb2 import ControlMessage
from sluice.internal.v1.frame_pb2 import FrameBundle
from sluice.internal.v1.task_pb2 import Task
from sluice.wire import subjects
from sluice.wire.codec import MalformedMessage, unpack

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from simulator.trace import Arrival
    from supervisor.state import StateDir

RESENT_S: Final = 5.0
"""A request that was cancelled this long ago is not sent again, seconds."""


def record(
    out: Path = Option(..., help="File to write; one that exists is replaced."),
    seconds: float = Option(
        60.0, help="Duration of the recording, in seconds.", min=0.1, metavar="SECONDS"
    ),
    settle: float = Option(
        30.0,
        help="Maximum wait for the last requests to end, in seconds.",
        min=0,
        metavar="SECONDS",
    ),
    nats_url: str | None = Option(
        None, help="NATS URL of the mesh.  [default: of the mesh in the state folder]"
    ),
    state_dir: options.StateDir = None,
) -> None:
    """Record traffic as a trace for `simulate` and `plan`.

    A trace has arrival times, lengths, classes and tenants; no text and no tokens. Subscribes to tasks and frames
    on NATS, beside their receivers. Ctrl-C ends it early and keeps what was recorded.
    """
    from supervisor.state import StateDir
    from supervisor.status import operator_certificate

    state = StateDir(state_dir)
    url, certificate = nats_url or _url_of(state), operator_certificate(state)
    with out.open("w", encoding="utf-8") as file:
        recorder = TrafficRecorder(lambda line: print(line, file=file, flush=True))
        try:
            asyncio.run(recorder.run(url, seconds, settle, certificate))
        except KeyboardInterrupt:
            output.note("interrupted")
    if not recorder.written:
        raise failure.CommandFailed("NOTHING_RECORDED", "no request ended while it was recorded")
    done = {"out": str(out), "requests": recorder.written, "unfinished": recorder.unfinished}
    text = f"wrote {recorder.written} requests to {out}"
    if recorder.unfinished:
        text += f"; {recorder.unfinished} more were left out: no end seen within --settle"
    output.show(done, text)


class TrafficRecorder:
    """Listens, and writes each request when it has ended.

    Attributes:
        written: requests so far.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        from simulator.trace import Recording

        self.written = 0
        self._write = write
        self._ended = asyncio.Event()
        self._recording = Recording(time.monotonic())

    @property
    def unfinished(self) -> int:
        """Requests whose end was not seen."""
        return len(self._recording) + self._recording.dropped

    async def run(self, url: str, seconds: float, settle_s: float, tls: Path | None = None) -> None:
        """Record new requests for `seconds`, and wait at most `settle_s` for their ends.

        Raises:
            CommandFailed: NATS does not answer.
        """
        from sluice.settings import NatsSettings
        from sluice.wire.connection import NatsUnreachable, connect, disconnect
        from sluice.wire.permissions import OPERATOR

        settings = NatsSettings(url=url)
        try:
            client = await connect(settings, OPERATOR, OPERATOR, lambda: None, tls)
        except NatsUnreachable as error:
            raise failure.CommandFailed("NATS_UNREACHABLE", str(error)) from error
        try:
            tasks = await client.subscribe(subjects.ALL_TASKS, cb=self._on_task)
            for subject in (subjects.ALL_CONTROL, subjects.CONTROL):
                await client.subscribe(subject, cb=self._on_control)
            await client.subscribe(subjects.OBSERVED_FRAMES, cb=self._on_frames)
            await asyncio.sleep(seconds)
            await tasks.unsubscribe()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(settle_s):
                    while len(self._recording):
                        self._ended.clear()
                        await self._ended.wait()
        finally:
            self._write_all(self._recording.cancelled(math.inf))
            await disconnect(client)

    async def _on_task(self, message: "Msg") -> None:
        with contextlib.suppress(MalformedMessage):  # the batcher makes it a dead letter
            self._recording.task(unpack(Task, message.data), time.monotonic())

    async def _on_control(self, message: "Msg") -> None:
        with contextlib.suppress(MalformedMessage):
            control = unpack(ControlMessage, message.data)
            self._recording.cancel(control.cancel.tasks, time.monotonic())
            self._ended.set()

    async def _on_frames(self, message: "Msg") -> None:
        now = time.monotonic()
        with contextlib.suppress(MalformedMessage):
            frames = unpack(FrameBundle, message.data).frames
            self._write_all(self._recording.frames(frames, now))
        self._write_all(self._recording.cancelled(now - RESENT_S))

    def _write_all(self, ended: "Sequence[Arrival]") -> None:
        from simulator.trace import format_line

        for arrival in ended:
            self._write(format_line(arrival))
            self.written += 1
            self._ended.set()


def _url_of(directory: "StateDir") -> str:
    state = directory.read() if directory.is_locked() else None
    if state is None:
        message = f"no mesh runs with {directory.root}; `sluice up` starts one, or give --nats-url"
        raise failure.CommandFailed("NOT_READY", message)
    return state.nats_url
