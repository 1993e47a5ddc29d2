"""Folders of sentence-transformers: what gateway and worker both read of an embedding model or a reranker.

    modules.json                        what follows the transformer: Pooling, Dense, Normalize, each with its folder
    sentence_bert_config.json           max_seq_length, do_lower_case; beside the transformer
    config_sentence_transformers.json   prompts

A folder without modules.json is a plain transformer, whose embeddings are the mean of its tokens, as
sentence-transformers takes it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sluice.errors import SettingsError
from sluice.settings.models import OFFSET_KINDS

FILES: Final = ("*.json", "*/*.json", "*.txt")
"""What a gateway needs of such a folder on the hub."""
_NO_PROMPT: Final[Mapping[str, str]] = {"query": "", "document": ""}
_WORDS: Final[Mapping[type, str]] = {dict: "object", list: "list"}
_UNLIMITED: Final = 10**6
"""Tokenizers without a limit name a number far above this."""


@dataclass(frozen=True)
class Module:
    """A module behind the transformer: its kind, such as "Pooling", and its folder."""

    kind: str
    folder: Path


@dataclass(frozen=True)
class SentenceFolder:
    """What a folder says of its model.

    Attributes:
        transformer: the folder of transformer and tokenizer.
        modules: those behind it.
        prompts: by name.
        default_prompt: the name of the one that texts get when none is named; empty: none.
        lower_case: whether texts are made lower case before they are tokenized.
        context_tokens: the longest text, unless the settings name another; None: it says nothing.
        positions: the longest that the model can compute; None: it says nothing.
        size: numbers of an embedding; None: it says nothing.
    """

    transformer: Path
    modules: tuple[Module, ...]
    prompts: Mapping[str, str]
    default_prompt: str
    lower_case: bool
    context_tokens: int | None
    positions: int | None
    size: int | None


def read_sentence_folder(folder: Path) -> SentenceFolder:
    """Read what `folder` says of its model.

    Raises:
        SettingsError: a file of it cannot be read, or is not JSON of the expected kind.
    """
    modules = _modules(folder)
    transformer = modules[0].folder if modules else folder
    own = next(iter(sorted(transformer.glob("sentence_*_config.json"))), None)
    limits = {} if own is None else read_json(own)
    about = read_json(folder / "config_sentence_transformers.json")
    prompts = {name: text or "" for name, text in (about.get("prompts") or {}).items()}
    return SentenceFolder(
        transformer=transformer,
        modules=modules[1:],
        prompts={**_NO_PROMPT, **prompts},
        default_prompt=about.get("default_prompt_name") or "",
        lower_case=bool(limits.get("do_lower_case")),
        context_tokens=_context(transformer, limits.get("max_seq_length")),
        positions=_positions(transformer),
        size=_size(transformer, modules[1:]),
    )


def _modules(folder: Path) -> tuple[Module, ...]:
    entries = read_json(folder / "modules.json", list)
    return tuple(
        Module(str(one["type"]).rpartition(".")[2], folder / str(one["path"])) for one in entries
    )


def _size(transformer: Path, modules: Sequence[Module]) -> int | None:
    """Return the size of an embedding, by the last module that changes it."""
    size: int | None = read_json(transformer / "config.json").get("hidden_size")
    for module in modules:
        config = read_json(module.folder / "config.json")
        if module.kind == "Pooling":
            modes = config.get("pooling_mode") or [
                key for key in config if "mode_" in key and config[key]
            ]
            size = size and size * (1 if isinstance(modes, str) else max(1, len(modes)))
        elif module.kind == "Dense":
            size = config.get("out_features")
    return size


def _context(transformer: Path, most: int | None) -> int | None:
    tokenizer = read_json(transformer / "tokenizer_config.json")
    limits = (most or tokenizer.get("model_max_length"), _positions(transformer))
    return min((int(one) for one in limits if one and one < _UNLIMITED), default=None)


def _positions(transformer: Path) -> int | None:
    config = read_json(transformer / "config.json")
    positions: int | None = config.get("max_position_embeddings")
    if positions and config.get("model_type") in OFFSET_KINDS:
        positions -= 1 + (config.get("pad_token_id") or 0)
    return positions


def read_json(path: Path, kind: type = dict, *, required: bool = False) -> Any:
    """Return the object or list in `path`; an empty one without the file, unless it is `required`.

    Raises:
        SettingsError: it cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not required:
            return kind()
        raise SettingsError(
            f"{path} is missing; the folder must be in Hugging Face layout"
        ) from error
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"{path} is not JSON ({error}); copy the model again") from error
    if not isinstance(content, kind):
        raise SettingsError(f"{path} does not hold a JSON {_WORDS[kind]}; copy the model again")
    return content
