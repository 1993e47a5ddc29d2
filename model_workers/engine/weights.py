"""Reads the content of model folders and hub ids: complete weights, and the tokenizer's file.

transformers silently initializes weights that a checkpoint lacks with random numbers; here that is an error.
"""

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from model_workers.constraints import ConstraintCompiler, with_end
from model_workers.model_folder import TOKENIZER
from sluice.settings import SettingsError

_NAMED: Final = 3
"""Number of weights that an error names."""

logger = logging.getLogger(__name__)


def read_whole(make: Any, path: str | Path, *, unused: Sequence[str] = (), **options: Any) -> Any:
    """Return what `make.from_pretrained` reads of a folder or hub id.

    Weights that are tied to others, or that the family computes, may be missing.

    - `unused`: Prefixes of names of weights that nothing here computes with; they may be missing too.

    Raises:
        SettingsError: A weight is missing, or its shape differs from the configuration.
        ValueError, OSError: It cannot be read.
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
    mismatched = {str(key[0]) for key in about["mismatched_keys"]}
    if mismatched:
        raise SettingsError(
            f"{path}: {_some(mismatched)} in its weights has another shape than config.json says; "
            "take both from the same model"
        )
    return model


def _some(names: Iterable[str]) -> str:
    first, rest = sorted(names)[:_NAMED], len(set(names)) - _NAMED
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")


def find_constraints(path: str) -> ConstraintCompiler | None:
    """Return the constraint compiler of a folder or hub id; None if its tokens cannot be constrained."""
    file = tokenizer_of(path)
    if file is None:
        logger.warning(
            "%s: no %s, so answers cannot be held to a schema or a regex", path, TOKENIZER
        )
        return None
    try:
        tokenizer = json.loads(file.read_text(encoding="utf-8"))
        return ConstraintCompiler(with_end(tokenizer))
    except ValueError as error:
        logger.warning("%s: answers cannot be held to a schema or a regex: %s", path, error)
        return None


def tokenizer_of(path: str) -> Path | None:
    """Return the tokenizer's file of a folder or hub id; None if there is none."""
    if Path(path).is_dir():
        return file if (file := Path(path, TOKENIZER)).is_file() else None
    # Imported here: folders, the shipped ones among them, load without transformers.
    from transformers.utils.hub import cached_file

    cached = cached_file(path, TOKENIZER, _raise_exceptions_for_missing_entries=False)
    return None if cached is None else Path(cached)
