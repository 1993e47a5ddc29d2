"""Converts a GGUF file to a folder in Hugging Face layout: `python -m model_workers.gguf_conversion FILE FOLDER`.

It runs in its own process, so that the memory of unpacked weights is released. `sluice.settings.model_cache` starts it.
The folder appears at once and complete: everything is written beside it and renamed. Progress goes to stderr, the
reason of a failure to stdout.
"""

import fcntl
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from model_workers.model_folder import TOKENIZER, first_line
from sluice.settings import SettingsError
from sluice.settings.model_cache import CHAT_EXTRA, MARKER, is_converted

BYTES_PER_VALUE: Final = 2
"""Size of a weight in bfloat16, on disk and in memory."""
BASE_BYTES: Final = 600_000_000
"""Memory of the libraries and of the tokenizer during a conversion."""
COPIES: Final = 2
"""Number of copies of the weights while transformers loads them: its tensors and those of the model."""
DISK_RESERVE_BYTES: Final = 100_000_000
"""Disk space for tokenizer and configuration, and a reserve."""

_UNREADABLE: Final = (ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError)
"""Errors of transformers for a file that it cannot convert."""


@dataclass(frozen=True)
class GgufFile:
    """Content of a GGUF file's header.

    Attributes:
        architecture: For example "llama".
        values: Number of values in all tensors.
    """

    path: Path
    architecture: str
    values: int

    @property
    def weight_bytes(self) -> int:
        """Size of the weights in bfloat16."""
        return self.values * BYTES_PER_VALUE


def read_header(file: Path) -> GgufFile:
    """Read the header of a GGUF file.

    Raises:
        SettingsError: It is not a GGUF file, is truncated or one of several parts; or the package gguf is missing.
    """
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise SettingsError("is not a GGUF file; name one, or a folder in Hugging Face layout")
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise SettingsError(f"GGUF files need the package gguf; {CHAT_EXTRA}") from error
    try:
        reader: Any = GGUFReader(file)
        values = sum(int(tensor.n_elements) for tensor in reader.tensors)
        architecture = str(_field(reader, "general.architecture"))
        parts = _field(reader, "split.count") or 1
    except (
        Exception
    ) as error:  # the library reads any bytes as lengths and raises whatever that gives
        raise SettingsError(
            f"is not whole ({first_line(error)}); copy or download it again"
        ) from error
    if parts > 1:
        raise SettingsError(
            f"is one of {parts} parts; merge them with llama.cpp's `llama-gguf-split --merge`"
        )
    return GgufFile(file, architecture, values)


def _field(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def check_room(header: GgufFile, folder: Path) -> None:
    """Raise an error for a file whose conversion does not fit into this machine's free memory and disk.

    Raises:
        SettingsError: What is needed and what is available.
    """
    memory = int(psutil.virtual_memory().available)
    disk = shutil.disk_usage(folder).free
    for needed, free, where, remedy in (
        (BASE_BYTES + COPIES * header.weight_bytes, memory, "of memory", "take a smaller model"),
        (
            DISK_RESERVE_BYTES + header.weight_bytes,
            disk,
            f"on the disk of {folder}",
            "name another folder in SLUICE_MODEL_CACHE",
        ),
    ):
        if needed > free:
            raise SettingsError(
                f"its conversion needs {needed / 1e9:.2f} GB {where} and {free / 1e9:.2f} GB are free; "
                f"free some, or {remedy}"
            )


def convert(file: Path, folder: Path) -> None:
    """Write the model in `file` to `folder` unless it is there; wait for a running conversion of the same file.

    Raises:
        SettingsError: The file cannot be converted, or does not fit into memory or disk.
        OSError: The file cannot be opened, or the folder not be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        # The end of a process releases it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_converted(folder):
            return
        started_at = time.monotonic()
        header = read_header(file)
        check_room(header, folder.parent)
        _print_progress(
            f"converting {file.name} ({header.values / 1e6:.0f} M parameters) once, to {folder}"
        )
        partial = folder.with_name(f"{folder.name}.partial")
        for leftover in (partial, folder):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        try:
            _write(header, partial)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        _print_progress(f"converted {file.name} in {time.monotonic() - started_at:.0f} s")


def _write(header: GgufFile, folder: Path) -> None:
    """Write tokenizer, configuration and weights, and at last `MARKER`."""
    import torch

    # Not AutoTokenizer: it reads the whole file once more to find the class, and all are this one.
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig, PreTrainedTokenizerFast

    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(header.path.parent),
        "gguf_file": header.path.name,
    }
    try:
        _print_progress("  1 of 3: tokenizer")
        config = AutoConfig.from_pretrained(**source)
        PreTrainedTokenizerFast.from_pretrained(**source).save_pretrained(folder)
        drop_unknown_tokens(folder, int(config.vocab_size))
        _print_progress("  2 of 3: weights")
        wide: dict[str, Any] = {
            "dtype": torch.bfloat16,
            "quantization_config": GgufConfig(dequantize=True),
        }
        model = AutoModelForCausalLM.from_pretrained(**source, config=config, **wide)
    except _UNREADABLE as error:
        raise SettingsError(
            f"transformers does not convert the architecture {header.architecture} ({first_line(error)}); "
            "serve it with llama.cpp behind `engine: openai` (docs/use/remote-models.md)"
        ) from error
    _print_progress("  3 of 3: writing")
    _write_model(model, folder)
    files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    (folder / MARKER).write_text(json.dumps(files, indent=1), encoding="utf-8")


def drop_unknown_tokens(folder: Path, size: int) -> None:
    """Drop special tokens after the `size` tokens of the file: transformers adds those of the family."""
    file = folder / TOKENIZER
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    unknown = {token["content"] for token in tokenizer["added_tokens"] if token["id"] >= size}
    if not unknown:
        return
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["id"] < size]
    file.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    config_file = folder / "tokenizer_config.json"
    values = json.loads(config_file.read_text(encoding="utf-8"))
    kept_values = {
        key: value
        for key, value in values.items()
        if not (key.endswith("_token") and value in unknown)
    }
    config_file.write_text(json.dumps(kept_values, indent=2, ensure_ascii=False), encoding="utf-8")


def _write_model(model: Any, folder: Path) -> None:
    """Write weights and configuration, as of a model that was never quantized."""
    model.hf_quantizer = None
    model.save_pretrained(folder, save_original_format=False)
    for file in folder.iterdir():
        file.chmod(0o644)  # made readable by its owner alone; processes may have other users


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Convert; return the exit code."""
    file, folder = map(Path, arguments)
    # Progress bars of libraries, and what they say of each step, are for their own users.
    os.environ.update(
        {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    )
    try:
        convert(file, folder)
    except SettingsError as error:
        print(error)
        return 1
    except OSError as error:
        print(
            f"cannot be converted ({error}); give access, or name another cache in SLUICE_MODEL_CACHE"
        )
        return 1
    except KeyboardInterrupt:
        print("the conversion was interrupted")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
