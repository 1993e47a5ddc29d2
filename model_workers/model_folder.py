"""Looks at a model folder in Hugging Face layout without loading it: is everything there, readable and whole?

Cheap (headers only, no torch), so that a broken folder is one clear line before any server starts.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from sluice.settings import ModelSettings, SettingsError, resolve_model_path
from sluice.settings.models import labels_of

CONFIG: Final = "config.json"
TOKENIZER: Final = "tokenizer.json"
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
EMBEDDINGS: Final = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
)
"""How the names of embedding tables end in the families of transformers."""

_HEADER_MAX: Final = 100_000_000
"""Longest header that safetensors itself accepts, bytes."""


def check_model(settings: ModelSettings) -> None:
    """Checks the folder that ``settings`` name; a hub id is left to the download.

    Raises:
        SettingsError: what is wrong with it, and what to do, in one line.
    """
    path = resolve_model_path(settings.path)
    folder = Path(path)
    if not folder.is_dir():
        if settings.path.startswith("builtin:") or folder.exists():
            raise SettingsError(f"models: {settings.name}: {path} is not a folder")
        return
    try:
        _check_folder(folder, with_weights=settings.engine != "echo")
        if settings.engine == "classifier":
            _check_labels(folder)
    except SettingsError as error:
        raise SettingsError(f"models: {settings.name}: {error}") from error
    if settings.draft is not None:
        _check_draft(settings, folder, Path(resolve_model_path(settings.draft)))


def check_same_tokens(settings: ModelSettings, tokenizer: Path, draft_tokenizer: Path) -> None:
    """Refuses a draft whose tokens are not the model's; of both, ``tokenizer.json``.

    Raises:
        SettingsError: they differ.
    """
    if _tokens(tokenizer) != _tokens(draft_tokenizer):
        raise SettingsError(
            f"models: {settings.name}: draft: {settings.draft} has other tokens than {settings.path}; "
            "take a model with the same tokenizer"
        )


def _check_labels(folder: Path) -> None:
    try:
        labels_of(_json(folder / CONFIG))
    except ValueError as error:
        raise SettingsError(f"{folder / CONFIG} {error}") from error


def _check_draft(settings: ModelSettings, folder: Path, draft: Path) -> None:
    if not draft.is_dir():
        return
    try:
        _check_folder(draft, with_weights=True)
    except SettingsError as error:
        raise SettingsError(f"models: {settings.name}: draft: {error}") from error
    check_same_tokens(settings, folder / TOKENIZER, draft / TOKENIZER)


def _check_folder(folder: Path, *, with_weights: bool) -> None:
    config = _json(folder / CONFIG)
    tokenizer = _json(folder / TOKENIZER)
    tensors = _tensors(folder) if with_weights else {}
    rows = _embedding_rows(config, tensors)
    size = _vocabulary_size(tokenizer, folder / TOKENIZER)
    if rows is not None and size > rows:
        raise SettingsError(
            f"{folder / TOKENIZER} has {size} tokens, but the model's embedding only {rows}; "
            "take the tokenizer that the model was trained with"
        )


def _json(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SettingsError(
            f"{path} is missing; the folder must be in Hugging Face layout"
        ) from error
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"{path} is not JSON ({error}); copy the model again") from error
    if not isinstance(values, dict):
        raise SettingsError(f"{path} does not hold a JSON object; copy the model again")
    return values


def _tensors(folder: Path) -> Mapping[str, Any]:
    """Name to description of every tensor, from the headers of all weight files."""
    found: dict[str, Any] = {}
    for path in _weight_files(folder):
        found |= _header(path)
    return found


def _weight_files(folder: Path) -> Iterable[Path]:
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if (folder / INDEX).exists():
        files = _json(folder / INDEX).get("weight_map", {}).values()
        return [folder / name for name in sorted(set(files))]
    if any(folder.glob("*.bin")):
        raise SettingsError(f"{folder} has pickled weights only; convert them to {WEIGHTS}")
    raise SettingsError(f"{folder} has no weights: neither {WEIGHTS} nor {INDEX}")


def _header(path: Path) -> Mapping[str, Any]:
    """The tensors of one safetensors file: eight bytes of length, then JSON, then the data."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= _HEADER_MAX else b""
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(f"{path} has no whole header; copy the file again") from error
    if size < 8 + length + end:
        raise SettingsError(
            f"{path} is cut off at {size} of {8 + length + end} bytes; copy the file again"
        )
    return header


def _embedding_rows(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> int | None:
    for name, entry in tensors.items():
        if name.endswith(EMBEDDINGS):
            return int(entry["shape"][0])
    rows = config.get("vocab_size")
    return rows if isinstance(rows, int) else None


def _tokens(path: Path) -> Mapping[int, str]:
    return _vocabulary(_json(path), path)


def _vocabulary_size(tokenizer: Mapping[str, Any], path: Path) -> int:
    """One above the highest token id."""
    return max(_vocabulary(tokenizer, path)) + 1


def _vocabulary(tokenizer: Mapping[str, Any], path: Path) -> Mapping[int, str]:
    """The tokens by their ids."""
    try:
        words = tokenizer["model"]["vocab"]
        if isinstance(words, list):
            found = {place: word for place, (word, _) in enumerate(words)}
        else:
            found = {token_id: word for word, token_id in words.items()}
        found |= {entry["id"]: entry["content"] for entry in tokenizer.get("added_tokens", ())}
        if not found:
            raise ValueError("no tokens")
        return found
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SettingsError(
            f"{path} is not a tokenizer with a vocabulary; copy it again"
        ) from error
