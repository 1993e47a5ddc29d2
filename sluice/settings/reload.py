"""What a running process may change of its configuration: the sections that it takes, and the refusal of all others."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final

from sluice.errors import SettingsError
from sluice.settings.mesh import Settings
from sluice.settings.problems import value_text

_SECRET: Final = ("_key", "secret", "password")
"""How keys end whose values are not repeated."""

Apply = Callable[[Settings], Awaitable[None] | None]
"""Takes new settings into force, all or nothing; what takes long is awaited.

Raises:
    SettingsError: they cannot work, or change what cannot be changed while running; the message names the key.
"""

TAKEN_WHILE_RUNNING: Final[Mapping[str, frozenset[str]]] = {
    "gateway": frozenset({"models", "safety", "routing", "tenants", "limits", "identity"}),
    "batcher": frozenset({"models", "retiring", "batcher", "tenants"}),
}
"""Processes that reload (`sluice.wire.reload`), each with the sections that it takes."""


def refuse_changes(
    old: Settings, new: Settings, sections: Collection[str], live: Collection[str] = ()
) -> None:
    """Raise SettingsError for the first key in `sections` that `new` changes, but for those in `live`."""
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    for section in sections:
        if difference := _difference(section, before[section], after[section], live):
            key, old_value, new_value = difference
            values = f" (running: {_word(old_value)}, new: {_word(new_value)})"
            if key.endswith(_SECRET):
                values = ""
            raise SettingsError(
                f"{key}: cannot be changed while running{values}; start again to change it"
            )


def _word(value: Any) -> str:
    return "unset" if value is None else value_text(value)


def _difference(
    key: str, before: Any, after: Any, live: Collection[str]
) -> tuple[str, Any, Any] | None:
    """Return the first key below `key` that differs and is not in `live`, with both values."""
    if before == after or key in live:
        return None
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        before, after = dict(enumerate(before)), dict(enumerate(after))
    if not isinstance(before, dict) or not isinstance(after, dict):
        return key, before, after
    for name in dict.fromkeys((*before, *after)):
        difference = _difference(f"{key}.{name}", before.get(name), after.get(name), live)
        if difference is not None:
            return difference
    return None
