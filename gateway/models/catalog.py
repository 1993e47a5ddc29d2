"""The models that a gateway serves: their settings, tokenizers and versions."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from gateway.models.tokenizer import ModelTokenizer
from sluice.settings import ModelSettings
from sluice.settings.sentence_folder import SentenceFolder


@dataclass(frozen=True)
class ServedModel:
    """One version of a model.

    Attributes:
        settings: Settings of the model.
        tokenizer: Tokenizer with the chat template.
        version: Digest that changes with the files and settings of the model.
        sentence: What the folder says of an embedding model or a reranker.
    """

    settings: ModelSettings
    tokenizer: ModelTokenizer
    version: str = ""
    sentence: SentenceFolder | None = None

    @cached_property
    def name(self) -> str:
        """The name in requests."""
        return self.settings.name

    @cached_property
    def task_name(self) -> str:
        """The name in tasks."""
        return self.settings.task_name

    @cached_property
    def context_tokens(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.tokenizer.context_tokens

    @cached_property
    def max_answer_tokens(self) -> int:
        """Largest max_tokens of a request."""
        return min(self.settings.max_answer_tokens or self.context_tokens, self.context_tokens)


class Catalog(dict[str, ServedModel]):
    """The latest version of each model by name, also of those that are no longer served; immutable.

    Args:
        models: Models that requests get now, by name.
        default: The model of "auto" when no routing rule applies.
        before: The catalog that this one replaces. Running requests may still look up its models and versions.

    Attributes:
        served: Models that requests get now, by name.
        default: The model of "auto" when no routing rule applies.
        names: Names of all served models.
        answering: Those that generate tokens.
        reading: Of these, those that take prompts.
        hearing: Of these, those that take audio.
        callable: Those that callers may name; the others are classifiers of the gateway itself.
        settings: Settings by name, also of models that are no longer served.
        tasks: Name of each served model in tasks, by name.
        answer_limits: Largest max_tokens of a request, by the models that answer.
        answer_limit: The largest of these, for "auto" and unknown models.
        versions: All that were ever served, by name and name in tasks; the served ones come last.
        marks_reasoning: Whether any version marks its reasoning.
    """

    def __init__(
        self, models: Mapping[str, ServedModel], default: str, before: "Catalog | None" = None
    ) -> None:
        self.served = models
        self.default = default
        self.names = tuple(models)
        self.tasks = {name: model.task_name for name, model in models.items()}
        served = {(name, self.tasks[name]): model for name, model in models.items()}
        earlier = dict(before.versions) if before else {}
        # Deleted and added again, so that the served versions stand last.
        for key in served:
            earlier.pop(key, None)
        self.versions: Mapping[tuple[str, str], ServedModel] = earlier | served
        super().__init__({name: model for (name, _), model in self.versions.items()})
        self.settings = {name: model.settings for name, model in self.items()}
        self.answering = tuple(name for name, model in models.items() if model.settings.answers)
        self.hearing = tuple(name for name in self.answering if models[name].tokenizer.speech)
        self.reading = tuple(name for name in self.answering if not models[name].tokenizer.speech)
        self.callable = tuple(name for name, model in models.items() if not model.tokenizer.labels)
        self.answer_limits = {name: models[name].max_answer_tokens for name in self.answering}
        self.answer_limit = max(self.answer_limits.values(), default=0)
        self.marks_reasoning = any(
            model.tokenizer.marks_reasoning for model in self.versions.values()
        )

    def task_names(self, name: str) -> list[str]:
        """Return the names of a model's versions in tasks, the served one first; the name itself if there is none."""
        names = [task_name for model, task_name in self.versions if model == name]
        return names[::-1] or [name]

    def of_engine(self, engine: str) -> tuple[str, ...]:
        """Return the names of the served models with this engine."""
        return tuple(name for name, model in self.served.items() if model.settings.engine == engine)

    def vocab_size(self, name: str) -> int:
        """Return the size of the vocabulary of `name`; the largest of all for "auto" and unknown ones."""
        names = (name,) if name in self.answering else self.answering
        return max((self[candidate].tokenizer.vocab_size for candidate in names), default=0)
