"""Which device each worker of a configuration runs on, and which share of its memory it may take."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle

from sluice.settings import ModelSettings, SettingsError


def place(models: Sequence[ModelSettings]) -> Mapping[str, ModelSettings]:
    """The settings of each worker by its name in Triton: on one device, with a share of that device's memory.

    What the shares that are set leave, the other workers of the device have in equal parts. Classifiers and echo
    engines have no cache and count for none; what others' servers compute has no worker in Triton.

    Raises:
        SettingsError: the shares of a device add up to more than 1.
    """
    here = [model for model in models if model.server is None]
    workers = {name: worker for model in here for name, worker in _workers(model)}
    caching = [worker for worker in workers.values() if worker.engine == "transformers"]
    unset = Counter(d for worker in caching if not worker.memory_share for d in _devices(worker))
    devices = {device for worker in caching for device in _devices(worker)}
    left = {device: 1 - _taken(caching, device) for device in devices}

    def shared(worker: ModelSettings) -> ModelSettings:
        if worker.engine != "transformers" or worker.memory_share:
            return worker
        share = min(left[device] / unset[device] for device in _devices(worker))
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
    """What it runs on. Names of the first device, or of the CPU where there is none, are the same."""
    if worker.device == "cpu":
        return ("cpu",)
    if worker.tensor_parallel > 1:
        return [f"cuda:{number}" for number in worker.devices or range(worker.tensor_parallel)]
    return ("cuda:0" if worker.device in ("auto", "cuda") else worker.device,)


def _taken(workers: Sequence[ModelSettings], device: str) -> float:
    """The sum of the shares that are set."""
    here = [worker for worker in workers if device in _devices(worker)]
    taken = sum(worker.memory_share or 0.0 for worker in here)
    some_unset = any(worker.memory_share is None for worker in here)
    if taken > 1 + 1e-9 or (some_unset and taken >= 1 - 1e-9):
        names = ", ".join(sorted({worker.name for worker in here}))
        raise SettingsError(
            f"models: {names}: memory_share: the workers on {device} take {taken:.3g} of it"
            f"{', and others nothing' if some_unset else ''}: lower one, or use other devices"
        )
    return taken
