"""Checks a model folder in Hugging Face layout for missing, unreadable and truncated files, without loading it.

It reads only headers and needs no torch, so that a broken folder is one clear line before any server starts.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from sluice.settings import ModelSettings, SettingsError, resolve_model_path
from sluice.settings.models import ELSEWHERE, GENERATE, check_modality, has_marian_pieces, labels_of
from sluice.settings.sentence_folder import read_json, read_sentence_folder
from sluice.wire.text_tokens import load_text_tokens

CONFIG: Final = "config.json"
TOKENIZER: Final = "tokenizer.json"
WEIGHTS: Final = "model.safetensors"
VOCABULARY: Final = "vocab.json"
INDEX: Final = "model.safetensors.index.json"
ADAPTER: Final = "adapter_config.json"
EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of configurations for the number of experts."""
EMBEDDINGS: Final = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
)
"""Endings of the names of embedding tables in the families of transformers."""
QUANTIZED: Final = "fp8"
"""The supported kind of quantized weights (`quant_method`): transformers widens them by itself."""


def check_model(settings: ModelSettings) -> None:
    """Check the folder that `settings` name; a hub id is left to the download.

    Raises:
        SettingsError: What is wrong with it, and what to do, in one line.
    """
    with named(settings.name):
        _check(settings, resolve_model_path(settings.path))


@contextmanager
def named(model: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors in the block into a SettingsError of this model; of other `kinds` use the first line."""
    try:
        yield
    except SettingsError as error:
        raise SettingsError(f"models: {model}: {error}") from error
    except kinds as error:
        raise SettingsError(f"models: {model}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """Return the first line of an error: the rest is for users of the library."""
    return (str(error).splitlines() or [""])[0].rstrip(".")


def _check(settings: ModelSettings, path: str) -> None:
    folder = Path(path)
    if not folder.is_dir():
        if settings.path.startswith("builtin:") or folder.exists():
            raise SettingsError(f"{path} is not a folder")
        return
    if settings.server is not None:
        _vocabulary(folder / TOKENIZER)
        if settings.server.api != "tokens":
            load_text_tokens(folder / TOKENIZER)
        return
    if settings.engine in ("embedding", "reranker", "token_classifier"):
        folder = read_sentence_folder(folder).transformer
    _check_folder(folder, settings.engine)
    if settings.engine in ("classifier", "token_classifier"):
        try:
            labels_of(_json(folder / CONFIG))
        except ValueError as error:
            raise SettingsError(f"{folder / CONFIG} {error}") from error
    if settings.draft is not None:
        _check_draft(settings, folder, Path(resolve_model_path(settings.draft)))


def check_same_tokens(settings: ModelSettings, tokenizer: Path, draft_tokenizer: Path) -> None:
    """Compare the tokens of a model and of its draft, by `tokenizer.json` of both.

    Raises:
        SettingsError: They differ, or one cannot be read.
    """
    if _vocabulary(tokenizer) != _vocabulary(draft_tokenizer):
        raise SettingsError(
            f"draft: {settings.draft} has other tokens than {settings.path}; "
            "take a model with the same tokenizer"
        )


def check_supported(where: str, config: Mapping[str, Any], engine: str = "transformers") -> None:
    """Raise an error for what the engine does not compute, by a model's configuration.

    Raises:
        SettingsError: What it is, and what to do.
    """
    check_modality(where, config, engine)
    method = _quant_method(config)
    if method not in (None, QUANTIZED):
        raise SettingsError(
            f"{where}: holds quantized weights ({method}), which this engine does not "
            f"compute; {ELSEWHERE}, or take the model's 16-bit weights"
        )
    experts = [config.get(name) for name in EXPERTS]
    if engine != "generate" and any(isinstance(count, int) and count > 1 for count in experts):
        raise SettingsError(
            f"{where}: is a mixture of experts, which this engine does not compute; {ELSEWHERE}, "
            f"take a dense model, or {GENERATE}"
        )


def weight_bytes(path: str, itemsize: int) -> int:
    """Return the memory of the weights in a folder, from the headers of its files; 0 for a hub id.

    Args:
        path: Folder or hub id.
        itemsize: Bytes per number.

    Raises:
        SettingsError: A file is missing or truncated.
    """
    folder = Path(path)
    if not folder.is_dir():
        return 0
    shapes = (shape for file in _weight_files(folder) for shape in _shapes(file).values())
    return itemsize * sum(math.prod(shape) for shape in shapes)


def _quant_method(config: Mapping[str, Any]) -> str | None:
    """Return the kind of quantized weights of a configuration; None if they are not quantized."""
    quantized = config.get("quantization_config") or config.get("compression_config")
    if not quantized:
        return None
    method = quantized.get("quant_method") if isinstance(quantized, Mapping) else None
    return str(method or "quantization_config")


def _check_draft(settings: ModelSettings, folder: Path, draft: Path) -> None:
    if not draft.is_dir():
        return
    try:
        _check_folder(draft)
    except SettingsError as error:
        raise SettingsError(f"draft: {error}") from error
    check_same_tokens(settings, folder / TOKENIZER, draft / TOKENIZER)


def _check_folder(folder: Path, engine: str = "transformers") -> None:
    if (folder / ADAPTER).exists():
        raise SettingsError(
            f"{folder} is a LoRA adapter, which this engine does not compute; merge it into its base model "
            "(merge_and_unload of peft), or serve both with vLLM behind `engine: openai`"
        )
    config = _json(folder / CONFIG)
    check_supported(str(folder / CONFIG), config, engine)
    marian = has_marian_pieces(folder)
    file = folder / (VOCABULARY if marian else TOKENIZER)
    words = _json(file) if marian else _vocabulary(file)
    size = max(map(int, words.values()), default=0) + 1
    sequences = config.get("vocab_size")
    for path in _weight_files(folder) if engine != "echo" else ():
        shapes = _shapes(path)
        tables = [name for name in shapes if name.endswith(EMBEDDINGS)]
        sequences = shapes[tables[0]][0] if tables else sequences
    if isinstance(sequences, int) and size > sequences:
        raise SettingsError(
            f"{file} has {size} tokens, but the model's embedding only {sequences}; "
            "take the tokenizer that the model was trained with"
        )


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = read_json(path, required=True)
    return content


def _weight_files(folder: Path) -> Iterable[Path]:
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if (folder / INDEX).exists():
        files = _json(folder / INDEX).get("weight_map", {}).values()
        return [folder / name for name in sorted(set(files))]
    if any(folder.glob("*.bin")):
        raise SettingsError(
            f"{folder} has pickled weights only; convert them to {WEIGHTS} (docs/internals/engine.md)"
        )
    raise SettingsError(f"{folder} has no weights: neither {WEIGHTS} nor {INDEX}")


def _shapes(path: Path) -> Mapping[str, Sequence[int]]:
    """Return the shapes of the tensors in a safetensors file."""
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (not iterable)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise SettingsError(f"{path} is not whole ({error}); copy the file again") from error


def _vocabulary(path: Path) -> Mapping[str, int]:
    """Return the tokens and their ids."""
    _json(path)
    try:
        vocabulary: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab()
    except Exception as error:  # the library raises nothing more specific
        raise SettingsError(f"{path} is not a tokenizer ({error}); copy it again") from error
    if not vocabulary:
        raise SettingsError(f"{path} is not a tokenizer with a vocabulary; copy it again")
    return vocabulary
