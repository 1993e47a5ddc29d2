"""Which settings a running batcher can take: policies, weights of tenants, limits. The rest needs a new process."""

from typing import Final

from sluice.settings import Settings
from sluice.settings.reload import refuse_changes

LIVE: Final = frozenset(
    f"batcher.{name}"
    for name in ("policy", "policies", "prefetch_rows", "prefetch_bytes", "drain_s")
)
"""Keys that are obeyed at once."""

SECTIONS: Final = ("models", "nats", "triton", "batcher")
"""What a batcher depends on; other sections are not its business."""


def check_change(before: Settings, after: Settings) -> None:
    """Raises SettingsError, with the key, when ``after`` changes what cannot be changed while running."""
    refuse_changes(before, after, SECTIONS, LIVE)
