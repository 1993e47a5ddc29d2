"""Which versions of models a mesh serves, and what a changed configuration makes of them. A core without I/O.

Every version has workers of its own, and a name of its own for tasks (`ModelSettings.task_name`). So the rows of one
that is replaced end where they began, and what makes up for lost workers never mixes two versions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sluice.settings import ModelSettings
from sluice.settings.models import LIVE_FIELDS


@dataclass(frozen=True)
class Version:
    """One version of a model.

    Attributes:
        model: as the configuration says.
        files: a digest of its folder.
        settings: with its generation and the addresses of its workers.
        processes: of its workers, where the mesh started them.
    """

    model: ModelSettings
    files: str
    settings: ModelSettings
    processes: tuple[str, ...] = ()

    def serves(self, model: ModelSettings, files: str) -> bool:
        """Return whether the workers can serve what a configuration asks for, whether or not it names addresses."""
        same = self.model.same_workers(model) or self.settings.same_workers(model)
        return same and self.files == files

    def taking(self, model: ModelSettings) -> "Version":
        """Return the version with the settings of `model` that gateways alone read."""
        live = {name: getattr(model, name) for name in LIVE_FIELDS}
        return replace(
            self,
            model=self.model.model_copy(update=live),
            settings=self.settings.model_copy(update=live),
        )


@dataclass(frozen=True)
class Change:
    """What a changed configuration makes of the versions.

    Attributes:
        models: all that it asks for, in its order: versions that are served already, and those to be started, without
            addresses and processes.
        retired: versions that get no more requests; their rows end.
        words: what happens to each model that changes, by its name.
    """

    models: tuple[Version, ...]
    retired: tuple[Version, ...]
    words: Mapping[str, str]

    @property
    def new(self) -> tuple[Version, ...]:
        """Versions whose workers are to be started."""
        return tuple(model for model in self.models if model.settings.triton_url is None)


def change_of(
    model_files: Sequence[tuple[ModelSettings, str]],
    served: Sequence[Version],
    retiring: Sequence[Version],
    generations: Mapping[str, int],
) -> Change:
    """Return the change to what a configuration asks for.

    A version that is retiring is taken back where it is asked for again, which costs nothing.

    Args:
        model_files: models with the digests of their folders.
        served: versions that get requests.
        retiring: versions whose rows are ending.
        generations: the last one of every model that the mesh has ever served.
    """
    before = {one.model.name: one for one in served}
    models, words = [], {}
    for model, files in model_files:
        loaded = [one for one in (*served, *retiring) if one.serves(model, files)]
        last = generations.get(model.name)
        generation = model.generation if last is None else last + 1
        new = Version(model, files, model.model_copy(update={"generation": generation}))
        chosen = loaded[0].taking(model) if loaded else new
        models.append(chosen)
        word = _word(before.get(model.name), chosen)
        if word:
            words[model.name] = word
    task_names = {one.settings.task_name for one in models}
    retired = [one for one in (*served, *retiring) if one.settings.task_name not in task_names]
    names = {one.model.name for one in models}
    words |= {name: "removed" for name in before if name not in names}
    return Change(tuple(models), tuple(retired), words)


def _word(before: Version | None, after: Version) -> str:
    if before is None:
        return "added"
    if before.settings.task_name != after.settings.task_name:
        return "replaced"
    return "" if before.settings == after.settings else "changed"
