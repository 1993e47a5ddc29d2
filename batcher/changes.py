"""Which settings a running batcher can take: policies, weights of tenants, limits. The rest needs a new process."""

from typing import Any, Final

from sluice.settings import Settings, SettingsError

LIVE: Final = frozenset({"policy", "policies", "prefetch_rows", "prefetch_bytes", "drain_s"})
"""Keys of ``batcher`` that are obeyed at once."""

SECTIONS: Final = ("models", "nats", "triton")
"""What a batcher depends on beside its own section; other sections are not its business."""


def check_change(before: Settings, after: Settings) -> None:
    """Raises SettingsError, with the key, when ``after`` changes what cannot be changed while running."""
    for section in SECTIONS:
        changed = _difference(getattr(before, section), getattr(after, section), section)
        if changed is not None:
            raise _fixed(changed)
    for name in type(before.batcher).model_fields:
        old, new = getattr(before.batcher, name), getattr(after.batcher, name)
        if name not in LIVE and old != new:
            raise _fixed(f"batcher.{name}")


def _difference(before: Any, after: Any, key: str) -> str | None:
    """The first key that differs."""
    if before == after:
        return None
    if isinstance(before, tuple) and len(before) == len(after):
        pairs = [
            (f"{key}.{index}", pair) for index, pair in enumerate(zip(before, after, strict=True))
        ]
    elif hasattr(type(before), "model_fields"):
        names = type(before).model_fields
        pairs = [(f"{key}.{name}", (getattr(before, name), getattr(after, name))) for name in names]
    else:
        return key
    found = (_difference(*values, name) for name, values in pairs)
    return next((name for name in found if name is not None), key)


def _fixed(key: str) -> SettingsError:
    return SettingsError(f"{key}: cannot be changed while the batcher runs; start it anew")
