"""Bounds of the work queue, which gateways and batchers both set."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TasksLimits:
    """How much may be in the work queue, tasks that batchers hold included."""

    messages: int = 100_000
    """Of one model and class: a flood of one does not shut out the others."""
    bytes: int = 1024 * 1024 * 1024
    """Of all."""
