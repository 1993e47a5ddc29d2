"""Control messages on their way to the batchers, collected until the shell sends them (once per turn of its loop)."""

from collections.abc import Callable
from dataclasses import dataclass

from sluice.internal.v1.control_pb2 import Cancel, Confirm, ControlMessage, Resend


@dataclass(frozen=True)
class Reaction:
    """What the batchers must be told after a frame."""

    resend_from: int | None = None
    confirm: bool = False
    cancel: bool = False
    hand_over: bool = False
    """The answer goes over to the second model: see `Stream.hand_over`."""


class Outbox:
    """What is to be said to the batchers next; saying it twice between two sends says it once."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        # Dictionaries as ordered sets.
        self._cancels: dict[str, None] = {}
        self._confirms: dict[str, None] = {}
        self._resends: dict[str, int] = {}

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
