"""Models of transformers with all of their weights: transformers draws numbers for those that a checkpoint lacks."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from sluice.settings import SettingsError

_NAMED: Final = 3


def read_whole(make: Any, path: str | Path, *, unused: Sequence[str] = (), **options: Any) -> Any:
    """What ``make.from_pretrained`` reads of a folder or hub id.

    Weights that are tied to others, or that the family computes, may be missing.

    Args:
        unused: how the names of weights begin that nothing here computes with; they may be missing too.

    Raises:
        SettingsError: a weight is missing, or has another shape than the configuration says.
        ValueError, OSError: it cannot be read.
    """
    model, about = make.from_pretrained(
        path, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    missing = {name for name in about["missing_keys"] if not name.startswith(tuple(unused))}
    if missing:
        tied = {name for name in missing if model.all_tied_weights_keys.get(name) in missing}
        raise SettingsError(
            f"{path}: is not whole, its weights lack {_some(missing - tied)}: copy or download it again, "
            f"or take a checkpoint of {type(model).__name__}"
        )
    other = {str(key[0]) for key in about["mismatched_keys"]}
    if other:
        raise SettingsError(
            f"{path}: {_some(other)} in its weights has another shape than config.json says; "
            "take both from the same model"
        )
    return model


def _some(names: Iterable[str]) -> str:
    first, rest = sorted(names)[:_NAMED], len(set(names)) - _NAMED
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")
