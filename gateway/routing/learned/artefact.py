"""A router as a file: arrays in safetensors, and a hash over all of it. Nothing in it is ever executed.

A file is loaded only if it is whole and was written in this format and for these columns.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from gateway.routing.learned import answer
from gateway.routing.learned.model import Calibration, Columns, Head, LearnedRouter, Words

Tensors = Mapping[str, NDArray[Any]]

KIND: Final = "sluice-router"
"""Marks a file as a router."""
VERSION: Final = 4
"""Version of the format."""
ABOUT: Final = {
    "kind": KIND,
    "format": str(VERSION),
    "columns": hashlib.sha256("\n".join(answer.NAMES).encode()).hexdigest(),
}
"""Metadata of a file: what it is, and a hash of the names of the columns that it was trained on."""


class BadArtefact(ValueError):
    """A file that is no router of this version; the message says why."""


def save_to(router: LearnedRouter, path: Path) -> LearnedRouter:
    """Write `router` to `path` in one step, and return it with its version."""
    version = write(path, dict(tensors_of(router)), ABOUT)
    return replace(router, version=version)


def write(path: Path, tensors: Tensors, about: Mapping[str, str]) -> str:
    """Write arrays and metadata in one step, with a hash over both; return the hash."""
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    version = _hash(tensors, about)
    scratch = path.with_name(f".{path.name}.writing")
    scratch.write_bytes(save(tensors, {**about, "hash": version}))
    scratch.replace(path)
    return version


def load(path: Path) -> LearnedRouter:
    """Load the router at `path`.

    Raises:
        BadArtefact: it is unreadable, incomplete, changed, or of another kind, format or set of
            columns.
    """
    about, tensors = _read(path)
    if about.get("kind") != KIND:
        raise BadArtefact(f"{path}: not a router")
    if about.get("format") != str(VERSION):
        raise BadArtefact(
            f"{path}: format {about.get('format')}, this program reads format {VERSION}: run `sluice router train`"
        )
    version = about.pop("hash", "")
    if version != _hash(tensors, about):
        raise BadArtefact(f"{path}: its hash does not match: the file was changed or damaged")
    if about.get("columns") != ABOUT["columns"]:
        raise BadArtefact(f"{path}: trained on other columns: run `sluice router train`")
    try:
        has_cascade = "cascade.calibration.gains" in tensors
        cascade = _head("cascade", Columns, tensors) if has_cascade else None
        return LearnedRouter(_head("prompts", Words, tensors), cascade, version)
    except KeyError as error:
        raise BadArtefact(f"{path}: no {error.args[0]} in it") from error


def _read(path: Path) -> tuple[dict[str, str], Tensors]:
    try:
        with safe_open(path, framework="numpy") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise BadArtefact(f"{path}: cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise BadArtefact(f"{path}: truncated or not a router: {error}") from error


def tensors_of(router: LearnedRouter) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield every array with its name: head, part, field."""
    for head_name, head in (("prompts", router.prompts), ("cascade", router.cascade)):
        parts = {} if head is None else {"part": head.part, "calibration": head.calibration}
        for name, part in parts.items():
            for field in fields(part):
                yield f"{head_name}.{name}.{field.name}", getattr(part, field.name)


def _head(head: str, kind: Any, tensors: Tensors) -> Head:
    def build(name: str, kind: Any) -> Any:
        return kind(*(tensors[f"{head}.{name}.{field.name}"] for field in fields(kind)))

    return Head(build("part", kind), build("calibration", Calibration))


def _hash(tensors: Tensors, about: Mapping[str, str]) -> str:
    digest = hashlib.sha256("\0".join(f"{key}={about[key]}" for key in sorted(about)).encode())
    for name in sorted(tensors):
        array = tensors[name]
        digest.update(f"\0{name}\0{array.dtype}\0{array.shape}\0".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
