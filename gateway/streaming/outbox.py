"""Control messages on their way to the batchers, collected until the shell sends them (once per turn of its loop)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sluice.internal.v1 import frame_pb2
from sluice.internal.v1.control_pb2 import Cancel, Confirm, ControlMessage, Resend


@dataclass(frozen=True)
class Reaction:
    """What batchers must be told about rows, and whose frames must be listened to."""

    cancels: tuple[str, ...] = ()
    """Rows that nobody wants any more."""
    confirms: tuple[str, ...] = ()
    """Rows whose final frame has arrived."""
    resends: tuple[tuple[str, int], ...] = ()
    """Rows of which frames are missing, and the index to begin at."""
    began: str = ""
    """A row whose task goes out."""

    def __add__(self, other: "Reaction") -> "Reaction":
        return Reaction(
            self.cancels + other.cancels,
            self.confirms + other.confirms,
            self.resends + other.resends,
            self.began or other.began,
        )


NOTHING: Final = Reaction()


def dismissed(row_id: str, final: frame_pb2.Final | None) -> Reaction:
    """Nothing more is wanted of a row: it is cancelled, or its end ``final`` confirmed."""
    if final is None:
        return Reaction(cancels=(row_id,))
    if final.end == frame_pb2.ROW_END_CANCELLED:
        return NOTHING
    return Reaction(confirms=(row_id,))


def refused(frame: frame_pb2.Frame) -> Reaction:
    """Nobody waits for ``frame``. It may be of a row whose cancel came before its task, and found nothing."""
    return dismissed(frame.request_id, frame.final if frame.HasField("final") else None)


class Outbox:
    """What is to be said to the batchers next; saying it twice between two sends says it once."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        # Dictionaries as ordered sets.
        self._cancels: dict[str, None] = {}
        self._confirms: dict[str, None] = {}
        self._resends: dict[str, int] = {}

    def tell(self, reaction: Reaction) -> None:
        """All that ``reaction`` says."""
        for row_id in reaction.cancels:
            self.cancel(row_id)
        for row_id in reaction.confirms:
            self.confirm(row_id)
        for row_id, index in reaction.resends:
            self.resend(row_id, index)

    def cancel(self, request_id: str) -> None:
        """The row is not wanted any more."""
        self._announce()
        self._cancels[request_id] = None

    def confirm(self, request_id: str) -> None:
        """The final frame arrived."""
        self._announce()
        self._confirms[request_id] = None

    def resend(self, request_id: str, from_index: int) -> None:
        """Frames from ``from_index`` on are missing."""
        self._announce()
        self._resends[request_id] = from_index

    def drain(self) -> list[ControlMessage]:
        """All messages, cancels first; the outbox is empty afterwards."""
        messages = []
        if self._cancels:
            messages.append(ControlMessage(cancel=Cancel(request_ids=list(self._cancels))))
        if self._confirms:
            messages.append(ControlMessage(confirm=Confirm(request_ids=list(self._confirms))))
        messages += [
            ControlMessage(resend=Resend(request_id=request_id, from_index=index))
            for request_id, index in self._resends.items()
        ]
        self._cancels, self._confirms, self._resends = {}, {}, {}
        return messages

    def _announce(self) -> None:
        if not (self._cancels or self._confirms or self._resends):
            self._on_first()
