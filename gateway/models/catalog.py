"""The models that this gateway serves: their settings with their tokenizers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from gateway.models.speech import SpeechTokens
from gateway.models.tokenizer import ModelTokenizer
from sluice.settings import ModelSettings
from sluice.settings.sentence_folder import SentenceFolder


@dataclass(frozen=True)
class ServedModel:
    """A model's settings, its tokenizer, and what the folder of an embedding model or a reranker says."""

    settings: ModelSettings
    tokenizer: ModelTokenizer
    version: str = ""
    """Changes with the files and settings of the model."""
    sentence: SentenceFolder | None = None
    speech: SpeechTokens | None = None
    """Of a model that takes audio, and no prompts."""

    @cached_property
    def name(self) -> str:
        """The name in requests."""
        return self.settings.name

    @cached_property
    def context_tokens(self) -> int:
        """Prompt and answer together, tokens."""
        return self.tokenizer.context_tokens

    @cached_property
    def max_answer_tokens(self) -> int:
        """Largest max_tokens of a request."""
        return min(self.settings.max_answer_tokens or self.context_tokens, self.context_tokens)


class Catalog:
    """The models by name, in the order of the configuration; it never changes.

    Args:
        before: the catalog that this one replaces. Requests may still look up models and versions of it.

    Attributes:
        default: the model of "auto" when no rule applies.
        served: those that requests get now, by name.
        names: of all of them.
        answering: those that draw tokens.
        reading: of these, those that take prompts.
        hearing: of these, those that take audio.
        callable: those that callers may ask for something; the others are classifiers.
        settings: by name.
        tasks: what tasks call each model, by name.
        marks_reasoning: whether some model does, or did before a reload.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        default: str,
        before: "Catalog | None" = None,
    ) -> None:
        self._models: dict[str, ServedModel] = {**(before._models if before else {}), **models}
        self.tasks = {name: one.settings.task_name for name, one in models.items()}
        present = {(name, self.tasks[name]): one for name, one in models.items()}
        known = before._versions if before else {}
        self._versions: dict[tuple[str, str], ServedModel] = {
            name: one for name, one in known.items() if name not in present
        } | present
        """All that were ever served, by name and task name, the present ones last."""
        self.served = models
        self.settings = {name: one.settings for name, one in self._models.items()}
        self.default = default
        self.names = tuple(models)
        self.answering = tuple(name for name, one in models.items() if one.settings.answers)
        self.hearing = tuple(name for name in self.answering if models[name].speech is not None)
        self.reading = tuple(name for name in self.answering if models[name].speech is None)
        self.marks_reasoning = any(one.tokenizer.marks_reasoning for one in self._versions.values())
        self.callable = tuple(name for name, one in models.items() if not one.tokenizer.labels)

    def __getitem__(self, name: str) -> ServedModel:
        return self._models[name]

    def task_names(self, name: str) -> list[str]:
        """What tasks call the model ``name``, of all its versions the present one first; of "auto" its own name."""
        found = [version for model, version in self._versions if model == name]
        return found[::-1] or [name]

    def version(self, name: str, task_name: str) -> ServedModel:
        """That version of a model; the present one where it has none of that name."""
        return self._versions.get((name, task_name), self._models[name])

    def of_engine(self, engine: str) -> tuple[str, ...]:
        """The names of the models with that engine."""
        return tuple(name for name, one in self.served.items() if one.settings.engine == engine)

    def max_answer_tokens(self, name: str) -> int:
        """Largest max_tokens of a request for ``name``; of any model for "auto" and unknown ones."""
        return max([one.max_answer_tokens for one in self._asked(name)], default=0)

    def vocab_size(self, name: str) -> int:
        """Size of the vocabulary of ``name``; the largest of all for "auto" and unknown ones."""
        return max((one.tokenizer.vocab_size for one in self._asked(name)), default=0)

    def _asked(self, name: str) -> Iterable[ServedModel]:
        """The models that may answer a request for ``name``."""
        return map(self.__getitem__, (name,) if name in self.answering else self.answering)
