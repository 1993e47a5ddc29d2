"""The models of a configuration: tokenizers, templates and limits, read from folders in Hugging Face layout."""

import hashlib
import re
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import TypeAdapter, ValidationError
from tokenizers import Tokenizer

from gateway.models.catalog import Catalog, ServedModel
from gateway.models.sentence_pieces import PieceTokenizer, marian_tokenizers
from gateway.models.speech import speech_tokens
from gateway.models.tokenizer import DEFAULT, TOOL_USE, ChatTemplate, ModelTokenizer
from gateway.models.tools import FORMATS, HERMES, ToolFormat, guess
from sluice.settings import ModelSettings, Settings, SettingsError, resolve_model_path
from sluice.settings.models import (
    check_modality,
    computed_context_of,
    context_tokens_of,
    has_marian_pieces,
    labels_of,
    language_config,
    takes_audio,
)
from sluice.settings.sentence_folder import (
    FILES,
    read_json,
    read_sentence_folder,
)
from sluice.wire.text_tokens import TEMPLATE, load_text_tokens

_FILES: Final = [
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    # Of Marian models, which have no tokenizer.json.
    "source.spm",
    "vocab.json",
]
CLASSIFIERS: Final = frozenset({"classifier", "token_classifier"})
_TEXT_ENGINES: Final = frozenset({"embedding", "reranker", "token_classifier"})
_VERSIONED: Final = frozenset({".json", ".jinja", ".model", ".spm", ".txt"})
_WEIGHTS: Final = frozenset({".safetensors", ".bin"})
_NO_VERSION: Final = {
    "triton_url", "replicas", "standby", "prompt_price", "answer_price", "slots", "generation"
}  # fmt: skip
"""Settings that no answer depends on."""
SETTLED_S: Final = 2.0
"""Least age of a change before the hash of the file is cached, in seconds."""
_HUB_BLOB: Final = re.compile(r"/models--[^/]+/blobs/[0-9a-f]{64}$")
_TEMPLATES: Final = "additional_chat_templates"
"""Folder of the templates beside chat_template.jinja, each called by its name."""
_NAMED_TEMPLATES: Final = TypeAdapter(list[dict[Literal["name", "template"], str]] | dict[str, str])


def load_catalog(settings: Settings, before: Catalog | None = None) -> Catalog:
    """Load the tokenizers of all models; models in `before` are loaded again only if they changed.

    Raises:
        SettingsError: a folder is missing, or not in the layout of a Hugging Face model.
    """
    models = load_models(settings, before.served if before else {})
    return Catalog(models, settings.routing.default, before)


def load_models(settings: Settings, loaded: Mapping[str, ServedModel]) -> dict[str, ServedModel]:
    """Return all models by name; those in `loaded` are loaded again only if they changed; raises as `load_catalog`."""
    return {
        model.name: _load_model(model, loaded.get(model.name), settings.cache.enabled)
        for model in settings.models
    }


def _load_model(model: ModelSettings, loaded: ServedModel | None, whole: bool) -> ServedModel:
    folder = ModelFolder(model)
    version = folder.version(whole=whole)
    if loaded is not None and (loaded.settings, loaded.version) == (model, version):
        return loaded
    return ServedModel(model, folder.tokenizer, version, folder.sentence)


class ModelFolder:
    """The folder of a model; raises SettingsError for files that it cannot use.

    A hub id is downloaded, without the weights.
    """

    def __init__(self, model: ModelSettings) -> None:
        self._model = model
        path, texts = Path(resolve_model_path(model.path)), model.engine in _TEXT_ENGINES
        # No folder, so it must be the id of a model on the hub.
        if not path.is_dir():
            path = _download(model.path, [*_FILES, *FILES] if texts else _FILES)
        self.path = path
        self.sentence = read_sentence_folder(path) if texts else None
        """Layout of an embedding model, a reranker or a token classifier; None for other models."""
        self._inner = path if self.sentence is None else self.sentence.transformer
        self._config: dict[str, Any] = read_json(self._inner / "config.json")
        self._generation: dict[str, Any] = read_json(self._inner / "generation_config.json")
        file = self._inner / "tokenizer.json"
        if not file.is_file() and not has_marian_pieces(path):
            raise SettingsError(
                f"{file.parent}: no tokenizer.json; "
                "have transformers write one (docs/internals/engine.md, Other formats)"
            )

    def version(self, *, whole: bool) -> str:
        """Return a hash over the settings and the files; raises OSError if a file cannot be read.

        The folder of a hub id is called by the commit, which names the weights; a gateway may not
        have them.

        Args:
            whole: answers are cached under it, so weights count with their whole content
                (`content_hash`), not only their size.
        """
        model, now = self._model, time.time()
        digest = hashlib.sha256(model.model_dump_json(exclude=_NO_VERSION).encode())
        digest.update(self.path.name.encode())
        weights = _WEIGHTS if Path(resolve_model_path(model.path)).is_dir() else frozenset()
        for file in self._files():
            if file.suffix in _VERSIONED | weights:
                is_read = whole or file.suffix not in weights
                content = content_hash(file, now) if is_read else file.stat().st_size
                digest.update(f"\n{file.relative_to(self.path)} {content}\n".encode())
        return digest.hexdigest()

    def _files(self) -> Iterable[Path]:
        """Return the files in order; the modules behind a transformer have folders of their own."""
        modules = () if self.sentence is None else self.sentence.modules
        folders = {
            self.path,
            self._inner,
            self._inner / _TEMPLATES,
            *(module.folder for module in modules),
        }
        files = (file for folder in folders if folder.is_dir() for file in folder.iterdir())
        return sorted(file for file in files if file.is_file())

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Labels of a classifier; empty for other models."""
        if self._model.engine not in CLASSIFIERS:
            return ()
        try:
            return labels_of(self._config)
        except ValueError as error:
            where = f"models: {self._model.name}: {self.path / 'config.json'}"
            raise SettingsError(f"{where} {error}") from error

    @cached_property
    def tokenizer(self) -> ModelTokenizer:
        """Tokenizer, chat template and limits."""
        model, config = self._model, self._config
        if model.server is None:
            check_modality(self._inner / "config.json", config, model.engine)
        # The server renders the conversation, so there is no template to apply here.
        if model.server is not None and model.server.api == "chat":
            return self._conversation_tokenizer()
        tokenizer_config = read_json(self._inner / "tokenizer_config.json")
        tokens = _special_tokens(
            tokenizer_config, read_json(self._inner / "special_tokens_map.json")
        )
        tokenizer, pieces = self._tokenizers(tokenizer_config, tokens)
        templates = _templates(self._inner, tokenizer_config)
        listens = model.engine == "transformers" and takes_audio(config)
        return ModelTokenizer(
            tokenizer=tokenizer,
            template=ChatTemplate(templates, tokens, datetime.now) if templates else None,
            context_tokens=self._context_tokens(),
            vocab_size=language_config(config).get("vocab_size") or tokenizer.get_vocab_size(),
            stop_token_ids=_stop_token_ids(tokenizer, tokens, (config, self._generation)),
            begin_token_ids=_begin_token_ids(tokenizer, tokens),
            labels=self.labels,
            tool_format=_tool_format(model, templates.get(TOOL_USE, templates.get(DEFAULT, ""))),
            pieces=pieces,
            speech=speech_tokens(config, self._generation, tokenizer) if listens else None,
        )

    def _conversation_tokenizer(self) -> ModelTokenizer:
        """Build the tokenizer of a model whose server takes messages: it has its own template and end token."""
        tokens = load_text_tokens(self._inner / "tokenizer.json")
        return ModelTokenizer(
            tokenizer=tokens.tokenizer,
            template=ChatTemplate(TEMPLATE, {}, datetime.now),
            context_tokens=self._context_tokens(),
            vocab_size=tokens.conversation,
            stop_token_ids=frozenset({tokens.end}),
            tool_format=HERMES,  # in which the worker writes the calls that the server makes
            marks_reasoning=True,
        )

    def _context_tokens(self) -> int:
        model, config, sentence = self._model, self._config, self.sentence
        tokens = model.context_tokens or (sentence and sentence.context_tokens)
        tokens = tokens or (
            context_tokens_of(config) if model.server else computed_context_of(config)
        )
        if tokens is None:
            raise SettingsError(
                f"{self._inner / 'config.json'}: no context length; set context_tokens of the model"
            )
        return tokens

    def _tokenizers(
        self, config: Mapping[str, Any], tokens: Mapping[str, str]
    ) -> tuple[Tokenizer, PieceTokenizer | None]:
        """Return the tokenizer, and the encoder of prompts if that is another one."""
        folder = self._inner
        if not has_marian_pieces(folder):
            return _tokenizer(folder / "tokenizer.json"), None
        try:
            if config.get("separate_vocabs"):
                raise ValueError("separate_vocabs: a vocabulary for each language is not served")
            source = (folder / "source.spm").read_bytes()
            return marian_tokenizers(source, read_json(folder / "vocab.json"), tokens)
        except (OSError, ValueError) as error:
            raise SettingsError(f"{folder}: its tokenizer cannot be read: {error}") from error


def _tokenizer(file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise SettingsError(f"{file}: is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _special_tokens(config: Mapping[str, Any], special: Mapping[str, Any]) -> dict[str, str]:
    """Return tokens such as `bos_token` by name; values are strings, or objects of an AddedToken.

    Like transformers: special_tokens_map.json replaces what an old tokenizer_config.json says; a newer one, which lists
    its added tokens, has them all, and the map fills in what is missing.
    """
    merged = {**special, **config} if "added_tokens_decoder" in config else {**config, **special}
    named = {key: value for key, value in merged.items() if key.endswith("_token")}
    contents = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in named.items()
    }
    return {key: text for key, text in contents.items() if isinstance(text, str) and text}


def _tool_format(model: ModelSettings, template: str) -> ToolFormat | None:
    if model.tool_format is None:
        return guess(template)
    if "tools" not in template:
        raise SettingsError(
            f"models: {model.name}: tool_format: its chat template takes no tools; write one to chat_template.jinja"
        )
    return FORMATS[model.tool_format]


def _templates(folder: Path, config: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the chat templates by name, empty without any; those in files replace those of the configuration.

    A single one is the default, whatever its name is.

    Raises:
        SettingsError: a file is no text, or the configuration has entries of another form.
    """
    files = {file.stem: file for file in sorted((folder / _TEMPLATES).glob("*.jinja"))}
    if (file := folder / "chat_template.jinja").is_file():
        files[DEFAULT] = file
    try:
        named = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    except (OSError, UnicodeDecodeError) as error:
        where = f"{folder}: a chat template cannot be read"
        raise SettingsError(f"{where}: {error}; write templates in UTF-8") from error
    named = named or _configured_templates(folder, config.get("chat_template") or {})
    # Some models name their only template, and callers could not know the name.
    if len(named) == 1:
        (text,) = named.values()
        return {DEFAULT: text}
    return named


def _configured_templates(folder: Path, source: object) -> dict[str, str]:
    if isinstance(source, str):
        return {DEFAULT: source}
    try:
        entries = _NAMED_TEMPLATES.validate_python(source)
        if isinstance(entries, dict):
            return entries
        return {entry["name"]: entry["template"] for entry in entries}
    except (ValidationError, KeyError) as error:
        raise SettingsError(
            f"{folder / 'tokenizer_config.json'}: chat_template: has no templates by name; "
            "write a text, or a list of {name, template}"
        ) from error


def _stop_token_ids(
    tokenizer: Tokenizer, tokens: Mapping[str, str], configs: Iterable[Mapping[str, Any]]
) -> frozenset[int]:
    ends: list[int | None] = [tokenizer.token_to_id(tokens.get("eos_token", ""))]
    for config in configs:
        value = language_config(config).get("eos_token_id")
        ends += value if isinstance(value, list) else [value]
    return frozenset(token_id for token_id in ends if token_id is not None)


def _begin_token_ids(tokenizer: Tokenizer, tokens: Mapping[str, str]) -> frozenset[int]:
    """Return the tokens that evaluations and training put before a text."""
    names = (tokens[name] for name in ("bos_token", "eos_token") if name in tokens)
    token_ids = map(tokenizer.token_to_id, names)
    return frozenset(token_id for token_id in token_ids if token_id is not None)


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


def content_hash(file: Path, now: float) -> str:
    """Return a hash over the whole content of `file`; raises OSError if it cannot be read.

    Hashes are cached by path, inode, size and times. New content always has a new change time
    (ctime), which no program can set, so a cached hash is that of the content. A file that changed
    a moment before `now`, in seconds since 1970, may change again within the same tick of the
    clock: its hash is not cached.
    """
    real = file.resolve()
    if _HUB_BLOB.search(str(real)):
        return real.name  # in the hub's cache a large file is called by its SHA-256
    status = real.stat()
    hashed = cached_hash if now - status.st_ctime >= SETTLED_S else hash_file
    return hashed(real, status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)


def hash_file(file: Path, *_identity: int) -> str:
    """Return the SHA-256 of `file`; the other arguments are keys of the cache."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


cached_hash: Final = cache(hash_file)
"""Caches `hash_file`. A file that changed while it was read is never looked up with these times again.
"""
