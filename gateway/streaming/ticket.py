"""What is fixed about a stream when its request is admitted, and who else has a say in its course."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gateway.routing.cascade.monitor import AnswerMonitor
from gateway.safety.guards.checks import Checks
from gateway.streaming.endings import Hops
from gateway.streaming.leg import Leg
from sluice.v1.inference_pb2 import Started

if TYPE_CHECKING:
    from gateway.streaming.stream import Stream


@dataclass(frozen=True)
class Ticket:
    """What is fixed when a request is admitted."""

    started: Started
    deadline: float
    """On the clock of ``now``, seconds."""
    with_logprobs: bool
    hops: Hops
    key: str = ""
    """Idempotency key, empty without one."""
    fingerprint: bytes = b""
    """Equal for equal requests."""
    on_end: "Callable[[Stream], None] | None" = None
    """Called once, when the stream has ended and is forgotten."""
    cascade: "Cascade | None" = None
    """How the answer may go over to a second model."""
    guards: "Guards | None" = None
    """The guard models that check prompt and answer."""


class Cascade(Protocol):
    """How one answer may go over to a second model.

    Attributes:
        watch: watches the first model's answer.
        holds: nothing of it is shown before its commit point.
        together: the second model's row runs from the beginning (speculative).
    """

    watch: AnswerMonitor
    holds: bool
    together: bool

    def refusal(self, now: float, *, ahead: bool) -> str:
        """Why the second model may not answer now; empty when it may. ``ahead``: nobody is in doubt yet."""

    def second(self, draft: str, now: float) -> Leg:
        """The second model's leg; ``draft`` is what the first one said. Its task must still be sent: `launch`."""

    def launch(self, stream: "Stream", leg: Leg) -> None:
        """Sends the task of the second model's ``leg``."""

    def unneeded(self) -> None:
        """The second model's row was let go: the answer has not gone over."""

    def ended(self) -> None:
        """The request has ended."""


class Guards(Protocol):
    """The guard models of one request."""

    @property
    def checks(self) -> Checks:
        """What they were asked, and what came of it."""

    def begin(self, stream: "Stream") -> None:
        """Asks about the prompt; the row of the answer is on its way already."""

    def produced(self, stream: "Stream", *, ended: bool) -> None:
        """The answer of ``stream`` has grown, or ended: asks what is due."""

    def restart(self) -> None:
        """Another model answers now."""

    def close(self) -> None:
        """The request has ended."""
