"""Renders the Triton model repository of a configuration: the device of each worker and its share of memory."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Final

from sluice.settings import ModelSettings, Settings, SettingsError, resolve_model_path

REQUEST: Final = "request"
RESPONSE: Final = "response"
CACHING: Final = frozenset({"transformers", "generate"})
"""Engines with keys and values in memory, of which each worker gets a share."""
PARAMETER: Final = "model_settings"
"""Parameter of config.pbtxt with the `ModelSettings` as JSON."""

_CONFIG: Final = """\
name: "{name}"
backend: "python"
max_batch_size: 0
model_transaction_policy {{ decoupled: true }}
input [ {{ name: "{request}" data_type: TYPE_UINT8 dims: [ -1 ] }} ]
output [ {{ name: "{response}" data_type: TYPE_UINT8 dims: [ -1 ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
parameters [ {{ key: "{parameter}" value: {{ string_value: {settings} }} }} ]
"""

_MODEL: Final = '''\
"""The entry point of Triton's Python backend; all code is in the model_workers package."""

from model_workers.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def render_repository(settings: Settings, folder: Path) -> None:
    """Write one Triton model per worker of each configured model into `folder`, creating it if needed.

    Raises:
        SettingsError: A model folder is missing, a GGUF file cannot be converted, or as `place`.
    """
    for name, model in place(settings.models).items():
        _render(model, name, folder)


def render_workers(models: Sequence[ModelSettings], folder: Path) -> None:
    """Write a repository for each worker, for example `folder`/NAME.1, whose only Triton model is called NAME.

    Raises:
        SettingsError: As `render_repository`.
    """
    for name, model in place(models).items():
        _render(model, model.name, folder / name)


def _render(model: ModelSettings, name: str, folder: Path) -> None:
    version = folder / name / "1"
    version.mkdir(parents=True, exist_ok=True)
    (folder / name / "config.pbtxt").write_text(_config(model, name), encoding="utf-8")
    (version / "model.py").write_text(_MODEL, encoding="utf-8")


def _config(model: ModelSettings, name: str) -> str:
    paths = {"path": _absolute(model.path), "draft": model.draft and _absolute(model.draft)}
    values = model.model_copy(update=paths).model_dump_json()
    return _CONFIG.format(
        name=name,
        request=REQUEST,
        response=RESPONSE,
        parameter=PARAMETER,
        settings=json.dumps(values, ensure_ascii=False),
    )


def _absolute(path: str) -> str:
    """Make a path absolute, because Triton runs in another working directory."""
    if path.startswith("builtin:"):
        return path
    path = resolve_model_path(path)
    return str(Path(path).resolve()) if Path(path).is_dir() else path


def place(models: Sequence[ModelSettings]) -> Mapping[str, ModelSettings]:
    """Return the settings of each worker by its name in Triton: on one device, with a share of its memory.

    Workers without a set share have equal parts of what the set ones leave on their device. Engines without a cache do
    not count (see `CACHING`); models on upstream servers have no worker in Triton.

    Raises:
        SettingsError: The shares of a device add up to more than 1, or leave nothing for its other workers.
    """
    here = [model for model in models if model.server is None]
    workers = {name: worker for model in here for name, worker in _workers(model)}
    caching = [worker for worker in workers.values() if worker.engine in CACHING]
    unset = Counter(d for worker in caching if not worker.memory_share for d in _devices(worker))
    devices = {device for worker in caching for device in _devices(worker)}
    free_share = {device: 1 - _reserved_share(caching, device) for device in devices}

    def shared(worker: ModelSettings) -> ModelSettings:
        if worker.engine not in CACHING or worker.memory_share:
            return worker
        share = min(free_share[device] / unset[device] for device in _devices(worker))
        return worker.model_copy(update={"memory_share": share})

    return {name: shared(worker) for name, worker in workers.items()}


def _workers(model: ModelSettings) -> list[tuple[str, ModelSettings]]:
    if not model.devices:
        return [(name, model) for name in model.triton_models]
    ranks = model.tensor_parallel
    groups = [model.devices[i : i + ranks] for i in range(0, len(model.devices), ranks)]
    places = zip(model.triton_models, cycle(groups), strict=False)
    return [(name, model.model_copy(update=_placed(group))) for name, group in places]


def _placed(group: tuple[int, ...]) -> dict[str, object]:
    if len(group) > 1:
        return {"devices": group}
    return {"device": f"cuda:{group[0]}", "devices": ()}


def _devices(worker: ModelSettings) -> Sequence[str]:
    """Return the devices of a worker; "auto" and "cuda" are `cuda:0`, also where there is none."""
    if worker.device == "cpu":
        return ("cpu",)
    if worker.tensor_parallel > 1:
        return [f"cuda:{number}" for number in worker.devices or range(worker.tensor_parallel)]
    return ("cuda:0" if worker.device in ("auto", "cuda") else worker.device,)


def _reserved_share(workers: Sequence[ModelSettings], device: str) -> float:
    """Return the sum of the set shares."""
    here = [worker for worker in workers if device in _devices(worker)]
    total = sum(worker.memory_share or 0.0 for worker in here)
    some_unset = any(worker.memory_share is None for worker in here)
    if total > 1 + 1e-9 or (some_unset and total >= 1 - 1e-9):
        names = ", ".join(sorted({worker.name for worker in here}))
        raise SettingsError(
            f"models: {names}: memory_share: the workers on {device} take {total:.3g} of it"
            f"{', and others nothing' if some_unset else ''}: lower one, or use other devices"
        )
    return total
