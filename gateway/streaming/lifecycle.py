"""What is fixed of an answer when its request is admitted, and the times that are reported of it."""

from collections.abc import Callable
from dataclasses import dataclass

from gateway.identity.resume_token import ResumeToken
from sluice.internal.v1.frame_pb2 import RowTimings
from sluice.v1.inference_pb2 import Started, Timings
from sluice.wire.clock import duration


@dataclass
class RequestTimings:
    """Time spent in the gateway, milliseconds; the rest of `Timings` comes with the final frame."""

    arrived_at: float
    """On the clock of ``now``, seconds."""
    safety_ms: float = 0.0
    route_ms: float = 0.0
    tokenize_ms: float = 0.0
    publish_ms: float = 0.0

    def with_row(self, row: RowTimings, first_token_at: float, now: float) -> Timings:
        """The timings of an answer that ends ``now``."""
        return Timings(
            safety=duration(self.safety_ms),
            route=duration(self.route_ms),
            tokenize=duration(self.tokenize_ms),
            publish=duration(self.publish_ms),
            queue=duration(row.queue_ms),
            batch=duration(row.batch_ms),
            prefill=duration(row.prefill_ms),
            decode=duration(row.decode_ms),
            time_to_first_token=duration((first_token_at - self.arrived_at) * 1000),
            total=duration((now - self.arrived_at) * 1000),
        )


@dataclass(frozen=True)
class StreamSpec:
    """What is fixed about a stream when its request is admitted."""

    started: Started
    deadline: float
    """On the clock of ``now``, seconds."""
    with_logprobs: bool
    timings: RequestTimings
    tenant: str = ""
    priority_class: str = ""
    key: str = ""
    """Idempotency key, empty without one."""
    fingerprint: bytes = b""
    """Equal for equal requests."""
    resume_token: Callable[[str], ResumeToken] | None = None
    """The resume token of an answer of the named model; None: no caller reads the answer."""
