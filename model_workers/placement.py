"""Which device each worker of a configuration runs on, and which share of its memory it may take."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle

from sluice.settings import ModelSettings, SettingsError


def place(models: Sequence[ModelSettings]) -> Mapping[str, ModelSettings]:
    """The settings of each worker by its name in Triton: on one device, with a share of that device's memory.

    What the shares that are set leave, the other workers of the device have in equal parts. Classifiers and echo
    engines have no cache and count for none.

    Raises:
        SettingsError: the shares of a device add up to more than 1.
    """
    workers = {name: worker for model in models for name, worker in _workers(model)}
    caching = [worker for worker in workers.values() if worker.engine == "transformers"]
    unset = Counter(_device(worker) for worker in caching if worker.memory_share is None)
    left = {device: 1 - _taken(caching, device) for device in {_device(w) for w in caching}}
    return {
        name: worker
        if worker.engine != "transformers" or worker.memory_share is not None
        else worker.model_copy(
            update={"memory_share": left[_device(worker)] / unset[_device(worker)]}
        )
        for name, worker in workers.items()
    }


def _workers(model: ModelSettings) -> list[tuple[str, ModelSettings]]:
    if not model.devices:
        return [(name, model) for name in model.triton_models]
    places = zip(model.triton_models, cycle(model.devices), strict=False)
    return [
        (name, model.model_copy(update={"device": f"cuda:{number}", "devices": ()}))
        for name, number in places
    ]


def _device(worker: ModelSettings) -> str:
    """Names of the first device, or of the CPU where there is none, are the same."""
    return "cuda:0" if worker.device in ("auto", "cuda") else worker.device


def _taken(workers: Sequence[ModelSettings], device: str) -> float:
    """The sum of the shares that are set."""
    here = [worker for worker in workers if _device(worker) == device]
    taken = sum(worker.memory_share or 0.0 for worker in here)
    some_unset = any(worker.memory_share is None for worker in here)
    if taken > 1 + 1e-9 or (some_unset and taken >= 1 - 1e-9):
        names = ", ".join(sorted({worker.name for worker in here}))
        raise SettingsError(
            f"models: {names}: memory_share: the workers on {device} take {taken:.3g} of it"
            f"{', and others nothing' if some_unset else ''}: lower one, or use other devices"
        )
    return taken
