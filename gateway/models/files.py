"""The small files of a model in Hugging Face layout that a gateway needs."""

import json
from pathlib import Path
from typing import Any, Final

from sluice.settings import SettingsError, resolve_model_path

_PATTERNS: Final = [
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
]


def model_folder(path: str) -> Path:
    """Where the files of ``path`` (see `ModelSettings.path`) lie; a hub id is downloaded, without the weights.

    Raises:
        SettingsError: there is no such folder or hub id, or the tokenizer is missing.
    """
    folder = Path(resolve_model_path(path))
    if not folder.is_dir():
        folder = _download(path)
    if not (folder / "tokenizer.json").is_file():
        raise SettingsError(
            f"{folder}: no tokenizer.json; save the tokenizer there in the fast (Rust) format"
        )
    return folder


def read_json(file: Path) -> dict[str, Any]:
    """The object in ``file``; empty when there is no such file.

    Raises:
        SettingsError: it is not a JSON object.
    """
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"{file}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise SettingsError(f"{file}: must be a JSON object")
    return value


def _download(hub_id: str) -> Path:
    # Imported here: a gateway that serves local folders should not pay for it.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_PATTERNS))
    except Exception as error:  # the library raises many kinds: network, name, access
        kind = type(error).__name__
        raise SettingsError(
            f"model {hub_id!r} is no folder and could not be fetched as a hub id ({kind})"
        ) from error
