"""A router as a file: arrays in safetensors, a header of JSON, a hash over both. Nothing in it is ever executed.

What is loaded was written whole, by this version, for these columns; anything else is refused with the reason.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from gateway.routing.learned import grams
from gateway.routing.learned.calibration import Calibration
from gateway.routing.learned.forest import Forest
from gateway.routing.learned.grams import Vocabulary
from gateway.routing.learned.head import Blend, Head
from gateway.routing.learned.linear import Linear
from gateway.routing.learned.regression import columns
from gateway.routing.learned.router import LearnedRouter

Tensors = Mapping[str, NDArray[Any]]

KIND: Final = "sluice-router"
VERSION: Final = 2
_LINEAR: Final = ("mean", "scale", "coefficients", "intercepts")
_FOREST: Final = ("roots", "column", "threshold", "child", "value")
_HELD_OUT: Final = ("gains", "weak", "strong")
_LINES: Final = ("gain_slope", "gain_intercept", "weak_slope", "weak_intercept")


class BadArtefact(ValueError):
    """A file that is no router of this version; the message says why."""


def save_to(router: LearnedRouter, path: Path) -> LearnedRouter:
    """Writes ``router`` to ``path`` and returns it with its version; readers see the old file or the whole new one."""
    tensors: dict[str, NDArray[Any]] = {}
    header: dict[str, Any] = {"heads": {}}
    for name, head in _heads(router).items():
        tensors |= {f"{name}.{key}": array for key, array in _tensors(head).items()}
        header["heads"][name] = _numbers(head)
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    text = json.dumps(header, sort_keys=True)
    version = _hash(tensors, text)
    about = {"kind": KIND, "version": str(VERSION), "hash": version, "header": text}
    scratch = path.with_name(f".{path.name}.writing")
    scratch.write_bytes(save(tensors, about))
    scratch.replace(path)
    return LearnedRouter(router.prompts, router.cascade, version)


def load(path: Path) -> LearnedRouter:
    """The router at ``path``.

    Raises:
        BadArtefact: it cannot be read, is cut short or changed, or is of another kind, version or set of columns.
    """
    about, tensors = _read(path)
    if about.get("kind") != KIND:
        raise BadArtefact(f"{path}: not a router")
    if about.get("version") != str(VERSION):
        raise BadArtefact(
            f"{path}: version {about.get('version')}, this program reads version {VERSION}"
        )
    if about.get("hash") != _hash(tensors, about.get("header", "")):
        raise BadArtefact(f"{path}: its hash does not match: the file was changed or damaged")
    heads = json.loads(about["header"])["heads"]
    try:
        loaded = {name: _head(path, name, numbers, tensors) for name, numbers in heads.items()}
        return LearnedRouter(loaded["prompts"], loaded.get("cascade"), about["hash"])
    except KeyError as error:
        raise BadArtefact(f"{path}: no {error.args[0]} in it") from error


def _read(path: Path) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    try:
        with safe_open(path, framework="numpy") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise BadArtefact(f"{path}: cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise BadArtefact(f"{path}: truncated or not a router: {error}") from error


def _heads(router: LearnedRouter) -> dict[str, Head]:
    heads = {"prompts": router.prompts}
    return heads if router.cascade is None else {**heads, "cascade": router.cascade}


def _tensors(head: Head) -> dict[str, NDArray[Any]]:
    ordered = sorted(head.vocabulary.index, key=head.vocabulary.index.__getitem__)
    return {
        **{f"prior.{name}": getattr(head.prior, name) for name in _LINEAR},
        **{f"linear.{name}": getattr(head.linear, name) for name in _LINEAR},
        "grams.names": grams.pack(ordered),
        "grams.rarity": head.vocabulary.rarity,
        "grams.values": head.gram_values,
        "grams.base": head.gram_base,
        **{f"forest.{name}": _narrow(getattr(head.forest, name)) for name in _FOREST},
        **{f"held_out.{name}": getattr(head.calibration, name) for name in _HELD_OUT},
    }


def _narrow(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.int32) if array.dtype == np.intp else array


def _widen(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.intp) if array.dtype == np.int32 else array


def _numbers(head: Head) -> dict[str, Any]:
    lines = {name: getattr(head.calibration, name) for name in _LINES}
    return {"blend": head.blend, "columns": _columns_hash(len(head.linear.mean)), **lines}


def _head(path: Path, name: str, numbers: Mapping[str, Any], tensors: Tensors) -> Head:
    def of(part: str, names: tuple[str, ...]) -> list[NDArray[Any]]:
        return [tensors[f"{name}.{part}.{key}"] for key in names]

    if numbers["columns"] != _columns_hash(len(tensors[f"{name}.linear.mean"])):
        raise BadArtefact(f"{path}: it was trained on other columns than this program reads")
    packed, rarity, values, base = of("grams", ("names", "rarity", "values", "base"))
    return Head(
        Linear(*of("prior", _LINEAR)),
        Linear(*of("linear", _LINEAR)),
        Vocabulary(grams.unpack(packed), rarity),
        values,
        base,
        Forest(*map(_widen, of("forest", _FOREST))),
        Blend(*numbers["blend"]),
        Calibration(*(numbers[line] for line in _LINES), *of("held_out", _HELD_OUT)),
    )


def _columns_hash(count: int) -> str:
    names = next((names for names in map(columns, (False, True)) if len(names) == count), ())
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def _hash(tensors: Tensors, header: str) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        array = tensors[name]
        digest.update(f"\0{name}\0{array.dtype}\0{array.shape}\0".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
