"""Which batchers share the workers of a model, as their reports say."""

from typing import Final

from sluice.internal.v1.control_pb2 import BatcherReport

EXPIRY_S: Final = 3.5
"""A batcher that was silent for this long is forgotten, seconds."""


class Peers:
    """All batchers that were heard lately, this one included; time is an argument, monotonic seconds."""

    def __init__(self, batcher: str) -> None:
        self._batcher = batcher
        self._models: dict[str, tuple[frozenset[str], float]] = {}

    def take(self, report: BatcherReport, now: float) -> bool:
        """A batcher's report; whether the number of batchers of some model may have changed."""
        if report.batcher == self._batcher:
            return False
        known = self._models.pop(report.batcher, None)
        models = frozenset(model.model for model in report.models if model.workers)
        if not report.leaving:
            self._models[report.batcher] = (models, now + EXPIRY_S)
        return report.leaving or known is None or known[0] != models

    def count(self, model: str, now: float) -> int:
        """Batchers that send to the workers of ``model``, at least this one."""
        for batcher in [b for b, (_, expires) in self._models.items() if expires <= now]:
            del self._models[batcher]
        return 1 + sum(model in models for models, _ in self._models.values())
