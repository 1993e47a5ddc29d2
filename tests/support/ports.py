"""A response sender without Triton: keeps what was sent, and lets tests wait for it."""

from threading import Condition

from sluice.internal.v1 import frame_pb2, worker_pb2

WAIT_S = 10.0


class FakePort:
    """See `model_workers.sender.ResponseSender`. Thread-safe."""

    def __init__(self) -> None:
        self.responses: list[worker_pb2.WorkerResponse] = []
        self.ended = False
        self.cancelled = False
        self.broken = False
        self._changed = Condition()

    def send(self, response: worker_pb2.WorkerResponse, *, last: bool = False) -> None:
        """Keeps a copy."""
        if self.broken:
            raise RuntimeError("the request is gone")
        with self._changed:
            assert not self.ended, "a response behind the last one"
            kept = worker_pb2.WorkerResponse()
            kept.CopyFrom(response)
            self.responses.append(kept)
            self.ended = last
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the request."""
        with self._changed:
            assert not self.ended, "ended twice"
            self.ended = True
            self._changed.notify_all()

    def is_cancelled(self) -> bool:
        """What the test has set."""
        return self.cancelled

    @property
    def frames(self) -> list[frame_pb2.Frame]:
        """All frames so far."""
        return [frame for response in list(self.responses) for frame in response.step.frames]

    @property
    def ends(self) -> dict[str, int]:
        """Ends by request."""
        return {f.request_id: f.final.end for f in self.frames if f.HasField("final")}

    def tokens(self, request_id: str) -> list[int]:
        """Tokens of one request so far."""
        return [t for f in self.frames if f.request_id == request_id for t in f.token_ids]

    def wait_responses(self, count: int = 1) -> None:
        """Returns when ``count`` responses have come."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.responses) >= count, WAIT_S)

    def wait_frames(self, count: int) -> None:
        """Returns when ``count`` frames have come."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.frames) >= count, WAIT_S)

    def wait_ends(self, *request_ids: str) -> None:
        """Returns when these rows have ended."""
        with self._changed:
            assert self._changed.wait_for(lambda: set(request_ids) <= set(self.ends), WAIT_S)

    def wait_ended(self) -> None:
        """Returns when the request is over."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.ended, WAIT_S)

    def admission(self) -> worker_pb2.Admission:
        """Waits for the only response."""
        self.wait_ended()
        return self.responses[0].admission
