"""The thread that sends: responses block for a round trip through shared memory, which must not hold up the engine."""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import Condition
from typing import Final

from model_workers.channel import BACKLOG_FRAMES_MAX, Channel, Channels, Parcel, Port
from sluice.internal.v1 import frame_pb2, worker_pb2

log = logging.getLogger(__name__)

ROOM_WAIT_S: Final = 1.0
"""The engine looks this often whether it should stop while it waits for the sender, seconds."""


class Sender:
    """Owns the channels; every method may be called from any thread. `run` is the thread.

    ``on_lost`` is called with a batcher's id, and when that was, after its channel turned out to be cancelled.
    """

    def __init__(
        self, channels: Channels, clock: Callable[[], float], on_lost: Callable[[str, float], None]
    ) -> None:
        self._channels = channels
        self._clock = clock
        self._on_lost = on_lost
        self._answers: deque[tuple[Port, worker_pb2.WorkerResponse | None]] = deque()
        self._changed = Condition()
        self._stopping = False

    def open(self, batcher: str, port: Port, heartbeat_s: float) -> None:
        """Opens the channel of a batcher; ends the one it replaces."""
        with self._changed:
            replaced = self._channels.open(batcher, port, heartbeat_s, self._clock())
            if replaced is not None:
                self._answers.append((replaced, None))
            self._changed.notify_all()

    def has_channel(self, batcher: str) -> bool:
        """Whether frames of this batcher have a way."""
        with self._changed:
            return batcher in self._channels

    def answer(self, port: Port, response: worker_pb2.WorkerResponse) -> None:
        """Sends the only response to a request."""
        with self._changed:
            self._answers.append((port, response))
            self._changed.notify_all()

    def post(
        self, frames: Mapping[str, Sequence[frame_pb2.Frame]], load: worker_pb2.WorkerLoad
    ) -> None:
        """Takes the frames of a step, by batcher, and the load after it."""
        with self._changed:
            self._channels.take_load(load, self._clock())
            for batcher, messages in frames.items():
                self._channels.post(batcher, messages)
            self._changed.notify_all()

    def has_room(self) -> bool:
        """Waits a bounded time until the backlog is below its limit; whether it is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._channels.backlog < BACKLOG_FRAMES_MAX, ROOM_WAIT_S
            )

    def stop(self) -> None:
        """Lets `run` send what waits, end all requests and return."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def run(self) -> None:
        """Sends until `stop`."""
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, self._patience())
                stopping = self._stopping
                answers, self._answers = self._answers, deque()
                parcels = self._channels.due(self._clock())
                self._changed.notify_all()
            for port, response in answers:
                self._try(lambda p=port, r=response: _answer(p, r))  # type: ignore[misc]
            for parcel in parcels:
                self._try(lambda p=parcel: self._deliver(p))  # type: ignore[misc]
            if stopping and not answers and not parcels:
                break
        self._close_all()

    def _has_work(self) -> bool:
        waits = bool(self._answers) or self._channels.backlog > 0
        return self._stopping or waits or self._patience() == 0

    def _patience(self) -> float | None:
        """Seconds until the next report is due; None without channels."""
        due_at = self._channels.next_due()
        return None if due_at is None else max(0.0, due_at - self._clock())

    def _deliver(self, parcel: Parcel) -> None:
        channel = parcel.channel
        if parcel.beat and channel.port.is_cancelled():
            self._lose(channel)
        else:
            channel.port.send(worker_pb2.WorkerResponse(step=parcel.report))

    def _lose(self, channel: Channel) -> None:
        with self._changed:
            lost_at = self._clock()
            was_open = self._channels.drop(channel)
        if was_open:
            log.info("the channel of batcher %s was cancelled", channel.batcher)
            self._on_lost(channel.batcher, lost_at)
            channel.port.close()

    def _close_all(self) -> None:
        with self._changed:
            channels = self._channels.drain()
        for channel in channels:
            self._try(channel.port.close)

    def _try(self, send: Callable[[], None]) -> None:
        # The thread must outlive a response that Triton does not take: its request is gone then.
        try:
            send()
        except Exception:
            log.exception("a response could not be sent")


def _answer(port: Port, response: worker_pb2.WorkerResponse | None) -> None:
    if response is None:
        port.close()
    else:
        port.send(response, last=True)
