"""Settings of the release before this one that are gone, and what replaces them."""

from collections.abc import Mapping
from typing import Final

_REMOVED: Final[Mapping[str, str]] = {
    "batcher.prefetch_rows": "is batcher.room_rows now, which counts rows of one gateway, model and class",
    "batcher.prefetch_bytes": "is batcher.room_bytes now",
    "nats.tasks_max_messages": "is gone: bulk calls wait in their gateway (batcher.room_rows); leave it out",
    "nats.tasks_max_bytes": "is gone: bulk calls wait in their gateway (batcher.room_bytes); leave it out",
    "nats.tasks_max_age_s": "is gone: bulk calls wait in their gateway until their deadline; leave it out",
    "cascade.start": "is gone: the second model starts when the first answer is in doubt; leave it out",
    "prefill_s_max": "is gone: the engine bounds bulk prompts beside more urgent ones itself; leave it out",
    "by_class": "is gone: what `false` did is `order: arrival`",
    "by_deadline": "is gone: what `false` did is `order: class`, which also leaves out shares of tenants",
    "by_tenant": "is gone: what `false` did is `order: class`, which also leaves out deadlines",
    "aging_rows": "is gone: an overdue class sends one row; for more, shorten its `aging_s`",
}
"""By the end of the key."""


def replacement(key: str) -> str | None:
    """What to do about ``key``, which is no setting; None: it never was one."""
    return next((text for end, text in _REMOVED.items() if f".{key}".endswith(f".{end}")), None)
