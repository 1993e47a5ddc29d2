"""A response sender without Triton: keeps what was sent, and lets tests wait for it."""

from threading import Condition

from sluice.internal.v1 import frame_pb2, worker_pb2

WAIT_S = 60.0


class FakePort:
    """See `model_workers.sender.ResponseSender`. Thread-safe."""

    def __init__(self) -> None:
        self.reports: list[worker_pb2.StepReport] = []
        self.ended = False
        self.cancelled = False
        self.broken = False
        self._changed = Condition()

    def send(self, report: worker_pb2.StepReport) -> None:
        """Keeps a copy."""
        if self.broken:
            raise RuntimeError("the request is gone")
        with self._changed:
            assert not self.ended, "a report behind the end"
            kept = worker_pb2.StepReport()
            kept.CopyFrom(report)
            self.reports.append(kept)
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
        return [frame for report in list(self.reports) for frame in report.frames]

    @property
    def admissions(self) -> dict[str, worker_pb2.Admission]:
        """Admissions so far, by batch."""
        return {a.batch_id: a for report in list(self.reports) for a in report.admissions}

    @property
    def ends(self) -> dict[str, int]:
        """Ends by request."""
        return {f.request_id: f.final.end for f in self.frames if f.HasField("final")}

    def tokens(self, request_id: str) -> list[int]:
        """Tokens of one request so far."""
        return [t for f in self.frames if f.request_id == request_id for t in f.token_ids]

    def wait_reports(self, count: int = 1) -> None:
        """Returns when ``count`` reports have come."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.reports) >= count, WAIT_S)

    def wait_ready(self) -> None:
        """Returns when the engine serves this channel."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(r.ready for r in self.reports), WAIT_S)

    def wait_room(self, *rows: int) -> None:
        """Returns when a report grants so many rows in all, by class."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: bool(self.reports) and tuple(self.reports[-1].task_grants) == rows, WAIT_S
            ), [tuple(report.task_grants) for report in self.reports]

    def wait_batches(self, count: int) -> None:
        """Return when a report says that rows of so many batches are in the engine."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: bool(self.reports) and self.reports[-1].load.batches == count, WAIT_S
            ), [report.load.batches for report in self.reports]

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

    def admission(self, batch_id: str = "batch") -> worker_pb2.Admission:
        """Waits until the engine has taken a batch."""
        with self._changed:
            assert self._changed.wait_for(lambda: batch_id in self.admissions, WAIT_S)
        return self.admissions[batch_id]
