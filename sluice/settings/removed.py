"""Settings of the release before this one that are gone, and what replaces them."""

from collections.abc import Mapping
from typing import Final

_REMOVED: Final[Mapping[str, str]] = {
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
