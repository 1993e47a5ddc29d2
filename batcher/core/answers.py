"""What goes out to gateways: frames in order, answers to `Resend`, and ends until they are confirmed."""

from collections.abc import Iterator

from batcher.core.book import Book
from batcher.core.finals import Finals
from batcher.core.frames import final_frame, resend
from batcher.core.rows import Row
from sluice.internal.v1 import frame_pb2


class Answers:
    """Frames that wait to be sent, and ends that wait to be confirmed."""

    def __init__(self, book: Book, final_retry_s: float) -> None:
        self._book = book
        self._finals = Finals(final_retry_s)
        self._resends: dict[str, int] = {}
        self._frames: list[tuple[str, frame_pb2.Frame]] = []

    def publish(self, row: Row, frame: frame_pb2.Frame) -> None:
        """Sends a frame to the row's gateway."""
        self._frames.append((row.task.gateway, frame))

    def end(self, row: Row, now: float, frame: frame_pb2.Frame | None = None) -> None:
        """Sends the end of a row for the first time; ``frame`` is the worker's last one, if it said so."""
        assert row.final is not None
        if frame is None:
            frame = final_frame(row)
        else:
            frame.final.CopyFrom(row.final)
        self.publish(row, frame)
        self._finals.sent(row.id, now)

    def cut(self, row: Row) -> None:
        """Sends the end of a row that needs no confirmation."""
        self.publish(row, final_frame(row))

    def unanswered(self, row: Row, now: float) -> None:
        """The gateway did not say what it has of the row: it is asked again."""
        self._finals.unanswered(row.id, now)

    def forget(self, row: Row) -> None:
        """The end of the row is confirmed, or wanted no more."""
        self._finals.forget(row.id)

    def resend(self, request_id: str, from_index: int) -> None:
        """The gateway misses frames from an index on."""
        known = self._resends.get(request_id, from_index)
        self._resends[request_id] = min(known, from_index)

    def repeat(self, now: float) -> Iterator[Row]:
        """Sends again what was not confirmed in time; gives the rows whose gateway is to be asked instead."""
        for request_id, tries in self._finals.due(now):
            row = self._book[request_id]
            if tries is None:
                yield row
            else:
                self.publish(row, final_frame(row))
                self._finals.sent(request_id, now, tries)

    def next_at(self) -> float | None:
        """When `repeat` has something to do."""
        return self._finals.next_at()

    def take(self) -> list[tuple[str, frame_pb2.Frame]]:
        """Gateway and frame, in order, since the last call."""
        # Once for all questions that came: an answer may be long, and a gateway that lost much asks often.
        for request_id, from_index in self._resends.items():
            row = self._book.get(request_id)
            if row is not None:
                for frame in resend(row, from_index):
                    self.publish(row, frame)
        self._resends.clear()
        frames, self._frames = self._frames, []
        return frames
