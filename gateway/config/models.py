"""The models of a configuration: their tokenizers, templates and limits, read from folders in Hugging Face layout."""

import hashlib
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from gateway.config.file_hashes import content_hash
from gateway.models.catalog import Catalog, ServedModel
from gateway.models.sentence_pieces import PieceTokenizer, marian_tokenizers
from gateway.models.speech import SpeechTokens, speech_tokens
from gateway.models.tokenizer import ChatTemplate, ModelTokenizer
from gateway.tools.formats import FORMATS, HERMES, ToolFormat, guess
from sluice.settings import ModelSettings, Settings, SettingsError, resolve_model_path
from sluice.settings.models import (
    check_modality,
    computed_context_of,
    context_tokens_of,
    has_marian_pieces,
    hears,
    labels_of,
    language_config,
)
from sluice.settings.sentence_folder import (
    FILES,
    SentenceFolder,
    read_json,
    read_sentence_folder,
)
from sluice.wire.text_tokens import TEMPLATE, load_text_tokens

_FILES: Final = [
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    # Of Marian models, which have no tokenizer.json.
    "source.spm",
    "vocab.json",
]
_TEXT_ENGINES: Final = frozenset({"embedding", "reranker", "token_classifier"})
_VERSIONED: Final = frozenset({".json", ".jinja", ".model", ".spm", ".txt"})
_WEIGHTS: Final = frozenset({".safetensors", ".bin"})
_NO_VERSION: Final = {
    *("triton_url", "replicas", "standby", "prompt_price", "answer_price", "slots", "generation"),
}
"""Settings that no answer depends on."""
_TOKEN_KEYS: Final = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


def load_catalog(settings: Settings, before: Catalog | None = None) -> Catalog:
    """Loads the tokenizers of all models; of those in ``before`` what has changed since.

    Raises:
        SettingsError: a folder is missing, or not in the layout of a Hugging Face model.
    """
    models = load_models(settings, before.served if before else {})
    return Catalog(models, settings.routing.default, before)


def load_models(settings: Settings, known: Mapping[str, ServedModel]) -> dict[str, ServedModel]:
    """Loads what is not among the ``known`` ones, or has changed since; raises as `load_catalog`."""
    return {
        model.name: _load_model(model, known.get(model.name), settings.cache.enabled)
        for model in settings.models
    }


def _load_model(model: ModelSettings, known: ServedModel | None, kept: bool) -> ServedModel:
    version = version_of(model, kept=kept)
    if known is not None and (known.settings, known.version) == (model, version):
        return known
    return ServedModel(model, load_tokenizer(model), version, sentence_of(model), speech_of(model))


def load_tokenizer(model: ModelSettings) -> ModelTokenizer:
    """Reads tokenizer, template and limits of ``model``.

    Raises:
        SettingsError: a file is missing or not what it should be.
    """
    folder, sentence = model_folder(model.path, model.engine), sentence_of(model)
    if sentence is not None:
        folder = sentence.transformer
    config = read_json(folder / "config.json")
    if model.server is None:
        check_modality(folder / "config.json", config)
    context_tokens = (
        model.context_tokens
        or (sentence and sentence.context_tokens)
        or _context_tokens(model, folder, config)
    )
    if model.server is not None and model.server.api == "chat":
        return _conversation_tokenizer(folder, context_tokens)
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    generation = read_json(folder / "generation_config.json")
    tokenizer, pieces = _tokenizers(folder, tokenizer_config)
    tokens = _special_tokens(tokenizer_config)
    template = _template_source(folder, tokenizer_config)
    return ModelTokenizer(
        tokenizer=tokenizer,
        template=ChatTemplate(template, tokens, datetime.now) if template else None,
        context_tokens=context_tokens,
        vocab_size=language_config(config).get("vocab_size") or tokenizer.get_vocab_size(),
        stop_token_ids=_stop_token_ids(tokenizer, tokens, (config, generation)),
        labels=labels_for(model),
        tool_format=_tool_format(model, template),
        pieces=pieces,
        hidden_tokens=_hidden_tokens(config, generation, tokenizer),
    )


def _conversation_tokenizer(folder: Path, context_tokens: int) -> ModelTokenizer:
    """Of a model whose server takes messages: it has a template and an end token of its own."""
    tokens = load_text_tokens(folder / "tokenizer.json")
    return ModelTokenizer(
        tokenizer=tokens.tokenizer,
        template=ChatTemplate(TEMPLATE, {}, datetime.now),
        context_tokens=context_tokens,
        vocab_size=tokens.conversation,
        stop_token_ids=frozenset({tokens.end}),
        tool_format=HERMES,  # in which the worker writes the calls that the server makes
        marks_reasoning=True,
    )


def version_of(model: ModelSettings, *, kept: bool) -> str:
    """A hash over settings and files of ``model``.

    Of a hub id the folder's name is the commit, which names the weights; a gateway may have none of them.

    Args:
        kept: answers are kept by it, so weights count with their whole content (`content_hash`); else with their size.
    """
    folder = model_folder(model.path, model.engine)
    digest = hashlib.sha256(model.model_dump_json(exclude=_NO_VERSION).encode())
    digest.update(folder.name.encode())
    weights = _WEIGHTS if Path(resolve_model_path(model.path)).is_dir() else frozenset()
    now = time.time()
    for file in _files_of(model, folder):
        if file.suffix in _VERSIONED | weights:
            whole = kept or file.suffix not in weights
            content = content_hash(file, now) if whole else file.stat().st_size
            digest.update(f"\n{file.relative_to(folder)} {content}\n".encode())
    return digest.hexdigest()


def _files_of(model: ModelSettings, folder: Path) -> Iterable[Path]:
    """In order; those of the modules behind a transformer lie in folders of their own."""
    folders, sentence = {folder}, sentence_of(model)
    if sentence is not None:
        folders |= {sentence.transformer, *(module.folder for module in sentence.modules)}
    found = (file for one in folders if one.is_dir() for file in one.iterdir())
    return sorted(file for file in found if file.is_file())


def sentence_of(model: ModelSettings) -> SentenceFolder | None:
    """What the folder of an embedding model or a reranker says; None for other models.

    Raises:
        SettingsError: a file of it is not JSON.
    """
    if model.engine not in _TEXT_ENGINES:
        return None
    return read_sentence_folder(model_folder(model.path, model.engine))


def speech_of(model: ModelSettings) -> SpeechTokens | None:
    """The control tokens of a model that takes audio; None for other models.

    Raises:
        SettingsError: a file of it is not what it should be.
    """
    if model.engine != "transformers":
        return None
    folder = model_folder(model.path)
    config = read_json(folder / "config.json")
    if not hears(config):
        return None
    return speech_tokens(config, read_json(folder / "generation_config.json"), _tokenizer(folder))


def labels_for(model: ModelSettings) -> tuple[str, ...]:
    """The labels of a classifier; empty for other models.

    Raises:
        SettingsError: a classifier has none.
    """
    if model.engine not in ("classifier", "token_classifier"):
        return ()
    path = model_folder(model.path, model.engine) / "config.json"
    config = read_json(path)
    try:
        return labels_of(config)
    except ValueError as error:
        raise SettingsError(f"models: {model.name}: {path} {error}") from error


def _hidden_tokens(
    config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Tokenizer
) -> frozenset[int]:
    return speech_tokens(config, generation, tokenizer).control if hears(config) else frozenset()


def _tokenizers(folder: Path, config: Mapping[str, Any]) -> tuple[Tokenizer, PieceTokenizer | None]:
    """The tokenizer, and what encodes prompts where that is another one."""
    if not has_marian_pieces(folder):
        return _tokenizer(folder), None
    try:
        source = (folder / "source.spm").read_bytes()
        return marian_tokenizers(source, read_json(folder / "vocab.json"), config)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{folder}: its tokenizer cannot be read: {error}") from error


def _tokenizer(folder: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise SettingsError(f"{folder / 'tokenizer.json'}: is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Values are strings, or objects of an AddedToken."""
    tokens = {}
    for key in _TOKEN_KEYS:
        value = config.get(key)
        content = value.get("content") if isinstance(value, dict) else value
        if content:
            tokens[key] = str(content)
    return tokens


def _tool_format(model: ModelSettings, template: str) -> ToolFormat | None:
    if model.tool_format is None:
        return guess(template)
    if "tools" not in template:
        raise SettingsError(
            f"models: {model.name}: tool_format: its chat template takes no tools; write one to chat_template.jinja"
        )
    return FORMATS[model.tool_format]


def _template_source(folder: Path, config: Mapping[str, Any]) -> str:
    """The chat template; empty: there is none. Of several the one for tools is taken, which does without them too."""
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several by name
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("tool_use", named.get("default"))
    return source or ""


def _context_tokens(model: ModelSettings, folder: Path, config: Mapping[str, Any]) -> int:
    found = context_tokens_of(config) if model.server else computed_context_of(config)
    if found is None:
        raise SettingsError(
            f"{folder / 'config.json'}: does not say how long the context is; set context_tokens of the model"
        )
    return found


def _stop_token_ids(
    tokenizer: Tokenizer, tokens: Mapping[str, str], configs: Iterable[Mapping[str, Any]]
) -> frozenset[int]:
    found: set[int] = set()
    for config in configs:
        value = language_config(config).get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    named = tokenizer.token_to_id(tokens["eos_token"]) if "eos_token" in tokens else None
    if named is not None:
        found.add(named)
    return frozenset(found)


def model_folder(path: str, engine: str = "") -> Path:
    """The folder of ``path`` (see `ModelSettings.path`); a hub id is downloaded, without the weights.

    Raises:
        SettingsError: there is no such folder or hub id, or the tokenizer is missing.
    """
    folder = Path(resolve_model_path(path))
    if not folder.is_dir():
        folder = _download(path, [*_FILES, *FILES] if engine in _TEXT_ENGINES else _FILES)
    if engine in _TEXT_ENGINES:
        tokenizer = read_sentence_folder(folder).transformer / "tokenizer.json"
    else:
        tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file() and not has_marian_pieces(folder):
        raise SettingsError(
            f"{tokenizer.parent}: no tokenizer.json; "
            "have transformers write one (docs/internals/engine.md, Other formats)"
        )
    return folder


def _download(hub_id: str, files: list[str]) -> Path:
    # Imported here: a gateway that serves local folders does not need it.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=files))
    except Exception as error:  # the library raises many kinds: network, name, access
        kind = type(error).__name__
        raise SettingsError(
            f"model {hub_id!r} is no folder and could not be fetched as a hub id ({kind})"
        ) from error
