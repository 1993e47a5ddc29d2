"""What a worker needs of the tokenizer's folder of its model."""

import json
from pathlib import Path
from typing import Final

from model_workers.model_folder import CONFIG, TOKENIZER
from sluice.settings import ModelSettings, SettingsError, resolve_model_path
from sluice.settings.models import context_tokens_of
from sluice.wire.text_tokens import TextTokens, load_text_tokens

CONTEXT_MAX: Final = 1 << 24
"""Where nothing says how long the context is; gateways refuse such a model."""


def find_text_tokens(model: ModelSettings) -> TextTokens | None:
    """The tokens of text; None for a server that takes and gives token ids.

    Raises:
        SettingsError: there is no tokenizer, or it loses something.
    """
    assert model.server is not None
    return None if model.server.api == "tokens" else load_text_tokens(_file(model, TOKENIZER))


def find_context(model: ModelSettings) -> int:
    """Prompt and answer together, tokens."""
    if model.context_tokens is not None:
        return model.context_tokens
    try:
        config = json.loads(_file(model, CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, SettingsError):
        return CONTEXT_MAX
    return context_tokens_of(config) or CONTEXT_MAX


def _file(model: ModelSettings, name: str) -> Path:
    path = resolve_model_path(model.path)
    if Path(path).is_dir():
        return Path(path, name)
    # Imported here: a folder needs no hub.
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(path, name))
    except Exception as error:  # the library raises many kinds: network, name, access
        kind = type(error).__name__
        raise SettingsError(f"models: {model.name}: {path}: no {name} ({kind})") from error
