"""Which requests a new model gets: a stated share, drawn by the name of the request."""

import hashlib
from collections.abc import Iterable

from sluice.routing import Trial


def drawn(trials: Iterable[Trial], model: str, key: str) -> list[Trial]:
    """The trials on ``model`` that the request named ``key`` takes part in; shares are drawn one by one."""
    return [trial for trial in trials if trial.of == model and _uniform(trial, key) < trial.share]


def _uniform(trial: Trial, key: str) -> float:
    """In [0, 1), even over keys and unrelated between trials."""
    digest = hashlib.blake2b(f"{trial.of} {trial.model} {key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
