"""The models of a configuration: their tokenizers, templates and limits, read from folders in Hugging Face layout."""

import hashlib
import os
import re
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from gateway.models.catalog import Catalog, ServedModel
from gateway.models.sentence_pieces import PieceTokenizer, marian_tokenizers
from gateway.models.speech import SpeechTokens, speech_tokens
from gateway.models.tokenizer import DEFAULT, TOOL_USE, ChatTemplate, ModelTokenizer
from gateway.models.tools import FORMATS, HERMES, ToolFormat, guess
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
    *("triton_url", "replicas", "standby", "prompt_price", "answer_price", "slots", "generation"),
}
"""Settings that no answer depends on."""
PART_BYTES: Final = 16 * 1024 * 1024
"""A file is hashed in parts of this size, several at a time."""
SETTLED_S: Final = 2.0
"""How long ago a file must have changed before its hash is kept, seconds."""
_THREADS: Final = 4
_HUB_BLOB: Final = re.compile(r"/models--[^/]+/blobs/[0-9a-f]{64}$")
_TEMPLATES: Final = "additional_chat_templates"
"""The folder of templates beside chat_template.jinja, each called by its name."""


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
    folder = ModelFolder(model)
    version = folder.version(kept=kept)
    if known is not None and (known.settings, known.version) == (model, version):
        return known
    return ServedModel(model, folder.tokenizer, version, folder.sentence, folder.speech)


class ModelFolder:
    """The folder of a model. Each file of it is read once; what cannot be used raises SettingsError.

    A hub id is downloaded, without the weights.
    """

    def __init__(self, model: ModelSettings) -> None:
        self._model = model
        path, texts = Path(resolve_model_path(model.path)), model.engine in _TEXT_ENGINES
        if not path.is_dir():
            path = _download(model.path, [*_FILES, *FILES] if texts else _FILES)
        self.path = path
        self.sentence = read_sentence_folder(path) if texts else None
        """What the folder of an embedding model or a reranker says; None for other models."""
        self._inner = path if self.sentence is None else self.sentence.transformer
        self._config: dict[str, Any] = read_json(self._inner / "config.json")
        self._generation: dict[str, Any] = read_json(self._inner / "generation_config.json")
        file = self._inner / "tokenizer.json"
        if not file.is_file() and not has_marian_pieces(path):
            raise SettingsError(
                f"{file.parent}: no tokenizer.json; "
                "have transformers write one (docs/internals/engine.md, Other formats)"
            )

    def version(self, *, kept: bool) -> str:
        """A hash over the settings and the files.

        Of a hub id the folder's name is the commit, which names the weights; a gateway may have none of them.

        Args:
            kept: answers are kept by it, so weights count with their whole content (`content_hash`); else with their
                size.
        """
        model, now = self._model, time.time()
        digest = hashlib.sha256(model.model_dump_json(exclude=_NO_VERSION).encode())
        digest.update(self.path.name.encode())
        weights = _WEIGHTS if Path(resolve_model_path(model.path)).is_dir() else frozenset()
        for file in self._files():
            if file.suffix in _VERSIONED | weights:
                whole = kept or file.suffix not in weights
                content = content_hash(file, now) if whole else file.stat().st_size
                digest.update(f"\n{file.relative_to(self.path)} {content}\n".encode())
        return digest.hexdigest()

    def _files(self) -> Iterable[Path]:
        """In order; those of the modules behind a transformer lie in folders of their own."""
        modules = () if self.sentence is None else self.sentence.modules
        folders = {
            self.path,
            self._inner,
            self._inner / _TEMPLATES,
            *(module.folder for module in modules),
        }
        found = (file for one in folders if one.is_dir() for file in one.iterdir())
        return sorted(file for file in found if file.is_file())

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The labels of a classifier; empty for other models."""
        if self._model.engine not in CLASSIFIERS:
            return ()
        try:
            return labels_of(self._config)
        except ValueError as error:
            where = f"models: {self._model.name}: {self.path / 'config.json'}"
            raise SettingsError(f"{where} {error}") from error

    @cached_property
    def speech(self) -> SpeechTokens | None:
        """The control tokens of a model that takes audio; None for other models."""
        if self._model.engine != "transformers":
            return None
        return self.tokenizer.speech

    @cached_property
    def tokenizer(self) -> ModelTokenizer:
        """Tokenizer, template and limits."""
        model, config = self._model, self._config
        if model.server is None:
            check_modality(self._inner / "config.json", config, model.engine)
        if model.server is not None and model.server.api == "chat":
            return self._conversation_tokenizer()
        tokenizer_config = read_json(self._inner / "tokenizer_config.json")
        tokens = _special_tokens(
            tokenizer_config, read_json(self._inner / "special_tokens_map.json")
        )
        tokenizer, pieces = self._tokenizers(tokenizer_config, tokens)
        templates = _templates(self._inner, tokenizer_config)
        speech = speech_tokens(config, self._generation, tokenizer) if hears(config) else None
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
            speech=speech,
        )

    def _conversation_tokenizer(self) -> ModelTokenizer:
        """Of a model whose server takes messages: it has a template and an end token of its own."""
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
        found = model.context_tokens or (sentence and sentence.context_tokens)
        found = found or (
            context_tokens_of(config) if model.server else computed_context_of(config)
        )
        if found is None:
            raise SettingsError(
                f"{self._inner / 'config.json'}: does not say how long the context is; set context_tokens of the model"
            )
        return found

    def _tokenizers(
        self, config: Mapping[str, Any], tokens: Mapping[str, str]
    ) -> tuple[Tokenizer, PieceTokenizer | None]:
        """The tokenizer, and what encodes prompts where that is another one."""
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
    """Return tokens such as ``bos_token`` by name; values are strings, or objects of an AddedToken.

    Like transformers: special_tokens_map.json replaces what an old tokenizer_config.json says; a newer one, which lists
    its added tokens, has them all, and the map fills in what is missing.
    """
    merged = {**special, **config} if "added_tokens_decoder" in config else {**config, **special}
    tokens = {}
    for key, value in merged.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str) and content:
            tokens[key] = content
    return tokens


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
        SettingsError: a file is no text, or the list has entries of another form.
    """
    files = {file.stem: file for file in sorted((folder / _TEMPLATES).glob("*.jinja"))}
    if (file := folder / "chat_template.jinja").is_file():
        files[DEFAULT] = file
    named: Mapping[str, str] = {name: _text_of(file) for name, file in files.items()}
    named = named or _configured_templates(folder / "tokenizer_config.json", config)
    if len(named) == 1:
        (text,) = named.values()
        return {DEFAULT: text}
    return named


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"{file}: cannot be read: {error}; write a template in UTF-8"
        ) from error


def _configured_templates(file: Path, config: Mapping[str, Any]) -> Mapping[str, str]:
    source = config.get("chat_template") or {}
    if isinstance(source, str):
        return {DEFAULT: source}
    try:
        named = (
            {one["name"]: one["template"] for one in source} if isinstance(source, list) else source
        )
        if all(isinstance(text, str) for text in (*named, *named.values())):
            return dict(named)
    except (TypeError, KeyError, AttributeError):
        pass
    raise SettingsError(
        f"{file}: chat_template: has no templates by name; write a text, or a list of {{name, template}}"
    )


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


def _begin_token_ids(tokenizer: Tokenizer, tokens: Mapping[str, str]) -> frozenset[int]:
    """Return the tokens that evaluations and training put before a text."""
    named = (tokens[name] for name in ("bos_token", "eos_token") if name in tokens)
    known = map(tokenizer.token_to_id, named)
    return frozenset(token_id for token_id in known if token_id is not None)


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
    """A hash of all of ``file``, which a process reads once; raises OSError when it cannot be read.

    A file is known by path, inode, size and times. One whose content is another has another change time (ctime), which
    no program can set, so a kept hash is that of the content. A file that changed a moment ago may change again within
    the same tick of the clock: its hash is not kept.

    Args:
        now: seconds since 1970.
    """
    real = file.resolve()
    if _HUB_BLOB.search(str(real)):
        return real.name  # in the hub's cache a large file is called by its SHA-256
    seen = real.stat()
    read = _kept if now - seen.st_ctime >= SETTLED_S else _read
    return read(real, seen.st_size, seen.st_ino, seen.st_mtime_ns, seen.st_ctime_ns)


def _read(file: Path, size: int, *_known_by: int) -> str:
    """A hash of the hashes of the parts."""
    with file.open("rb") as opened, ThreadPoolExecutor(_THREADS) as pool:

        def part(start: int) -> bytes:
            return hashlib.sha256(os.pread(opened.fileno(), PART_BYTES, start)).digest()

        parts = pool.map(part, range(0, size, PART_BYTES))
        return hashlib.sha256(b"".join(parts)).hexdigest()


_kept: Final = cache(_read)
"""What it returned is that of the content; where the file changed meanwhile, nobody asks with these times again."""
