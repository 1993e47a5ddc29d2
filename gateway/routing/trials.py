"""Which requests a second model gets, in place of the first (canary) or beside it (shadow): a stated share, drawn by
the name of the request."""

import hashlib
from collections.abc import Iterable
from typing import Final

from sluice.settings.routing import Trial

SHADOW: Final = "shadow "
"""Salt of draws for shadows, so that they are unrelated to those for canaries."""


def drawn(trials: Iterable[Trial], model: str, key: str, salt: str = "") -> list[Trial]:
    """The trials on ``model`` that the request named ``key`` takes part in; shares are drawn one by one."""
    of_model = (trial for trial in trials if trial.of == model)
    return [trial for trial in of_model if _uniform(trial, key, salt) < trial.share]


def _uniform(trial: Trial, key: str, salt: str) -> float:
    """In [0, 1), even over keys and unrelated between trials."""
    name = f"{salt}{trial.of} {trial.model} {key}"
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
