"""Attempts of a row, as fencing tokens: of two processes that work on one row, the one with the lower attempt is the
earlier owner.

A gateway numbers its tasks in steps of `ATTEMPTS_PER_TASK`; a batcher counts its own sends to workers from there.
"""

from typing import Final

ATTEMPTS_PER_TASK: Final = 1000


def next_task_attempt(attempt: int) -> int:
    """The attempt of a task that is sent again: above all that the owner of ``attempt`` can use."""
    return (attempt // ATTEMPTS_PER_TASK + 1) * ATTEMPTS_PER_TASK


def task_attempt(attempt: int) -> int:
    """The attempt of the task that a row's ``attempt`` belongs to."""
    return attempt - attempt % ATTEMPTS_PER_TASK
