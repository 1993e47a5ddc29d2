"""How fast a worker steps, out of its reports."""

from typing import Final

from sluice.internal.v1 import worker_pb2

_SHARE: Final = 0.1
"""What one observation weighs in the running means."""


class Pace:
    """Running means of a worker's step and of what a prompt token adds to it; 0 while nothing is known."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.prefill_token_s = 0.0
        self._load: worker_pb2.WorkerLoad | None = None
        self._at = 0.0

    def note(self, load: worker_pb2.WorkerLoad, now: float) -> None:
        """A report came. Only reports on either side of steps without a pause between them tell something."""
        before, passed_s = self._load, now - self._at
        self._load, self._at = load, now
        if before is None or not before.running or not load.running:
            return
        steps = load.steps - before.steps
        if steps <= 0:
            return
        computed = before.waiting_tokens - load.waiting_tokens
        if computed > 0 and self.step_s:
            extra_s = max(0.0, passed_s - steps * self.step_s)
            self.prefill_token_s = _mean(self.prefill_token_s, extra_s / computed)
        elif computed == 0:
            self.step_s = _mean(self.step_s, passed_s / steps)


def _mean(known: float, seen: float) -> float:
    return known + _SHARE * (seen - known) if known else seen
