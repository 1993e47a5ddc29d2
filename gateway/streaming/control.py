"""Control messages on their way to the batchers, collected until they are sent (once per turn of the event loop)."""

from collections.abc import Callable

from sluice.internal.v1 import frame_pb2
from sluice.internal.v1.control_pb2 import Cancel, Confirm, ControlMessage, Resend


class ControlOutbox:
    """The messages that go out next. A message that is added twice between two sends is sent once.

    Attributes:
        on_first: called when a message is added to an empty outbox.
    """

    def __init__(self) -> None:
        self.on_first: Callable[[], None] = lambda: None
        # Dictionaries as ordered sets.
        self._cancels: dict[str, None] = {}
        self._confirms: dict[str, None] = {}
        self._resends: dict[str, int] = {}

    def cancel(self, row_id: str) -> None:
        """The row is not needed any more."""
        self._schedule()
        self._cancels[row_id] = None

    def resend(self, row_id: str, from_index: int) -> None:
        """Frames from ``from_index`` on are missing."""
        self._schedule()
        self._resends[row_id] = from_index

    def release(self, row_id: str, final: frame_pb2.Final | None) -> None:
        """Nothing more is expected of a row: cancels it, or confirms its end ``final``."""
        if final is None:
            self.cancel(row_id)
        elif final.end != frame_pb2.ROW_END_CANCELLED:
            self._schedule()
            self._confirms[row_id] = None

    def reject(self, frame: frame_pb2.Frame) -> None:
        """No request waits for ``frame``. An earlier cancel may have arrived before the task, and found nothing."""
        self.release(frame.request_id, frame.final if frame.HasField("final") else None)

    def drain(self) -> list[ControlMessage]:
        """All messages, cancels first; the outbox is empty afterwards."""
        messages = []
        if self._cancels:
            messages.append(ControlMessage(cancel=Cancel(request_ids=list(self._cancels))))
        if self._confirms:
            messages.append(ControlMessage(confirm=Confirm(request_ids=list(self._confirms))))
        messages += [
            ControlMessage(resend=Resend(request_id=row_id, from_index=index))
            for row_id, index in self._resends.items()
        ]
        self._cancels, self._confirms, self._resends = {}, {}, {}
        return messages

    def _schedule(self) -> None:
        if not (self._cancels or self._confirms or self._resends):
            self.on_first()
