"""Engines of models that read a whole text at once, on transformers' own model code.

Most return numbers: embeddings, scores of pairs (rerankers), labels of tokens (NER). A sequence classifier answers with
the number of the best label as its only token, and the log-probabilities of all labels, so that no other message is
needed.
"""

import logging
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from typing_extensions import override

from model_workers.engine.cacheless import WholeTextEngine
from model_workers.engine.devices import find_device, find_dtype
from model_workers.engine.forward.encoder import PaddedTexts, Text
from model_workers.engine.forward.hub import replace_linear_layers
from model_workers.engine.forward.load import find_context
from model_workers.engine.forward.pooling import Pipeline
from model_workers.engine.protocol import (
    SequenceEnd,
    SequenceSpec,
    SequenceStep,
    TokenLogprobs,
    warm_up,
)
from model_workers.engine.sequences import Sequence, SequenceLimits
from model_workers.engine.weights import read_whole
from sluice.errors import InvalidRequest
from sluice.internal.v1 import task_pb2
from sluice.settings import ModelSettings, SettingsError, resolve_model_path
from sluice.settings.models import labels_of
from sluice.settings.sentence_folder import SentenceFolder, read_sentence_folder

Values = NDArray[np.float32]
Compute = Callable[[abc.Sequence[SequenceSpec]], abc.Sequence[Values]]
"""Computes the numbers of each sequence."""

Classify = Callable[[abc.Sequence[abc.Sequence[int]]], abc.Sequence[abc.Sequence[float]]]
"""Computes the natural log-probability of every label for each text."""

_ACTIVATIONS: Final = {
    "Sigmoid": torch.sigmoid,
    "Identity": lambda logits: logits,
    "Tanh": torch.tanh,
}
"""Supported activations of rerankers, by the name of torch's class."""
_HUB_FILES: Final = ("*.json", "*/*.json", "*.txt", "*.safetensors", "*/*.safetensors")
"""Files that are fetched for a hub id."""

logger = logging.getLogger(__name__)


class ValuesEngine(WholeTextEngine):
    """An engine that returns numbers; see `Engine`."""

    def __init__(self, compute: Compute, limits: SequenceLimits, vocab_size: int) -> None:
        # Nothing is drawn: a text may fill the context.
        super().__init__(replace(limits, context_tokens=limits.context_tokens + 1))
        self._compute = compute
        self._vocab_size = vocab_size

    @override
    def add(self, sequence: SequenceSpec, now: float) -> None:
        if sequence.values is None or sequence.values.scored_token_ids:
            raise InvalidRequest(
                "this model gives no tokens; ask for an embedding or a score of texts"
            )
        if max(sequence.prompt, default=0) >= self._vocab_size:
            raise InvalidRequest(f"a token is not one of the model's {self._vocab_size}")
        super().add(sequence, now)

    def _answers(self, sequences: abc.Sequence[Sequence]) -> list[SequenceStep]:
        results = self._compute([sequence.spec for sequence in sequences])
        return [_end(sequence, values) for sequence, values in zip(sequences, results, strict=True)]


class ClassifierEngine(WholeTextEngine):
    """An engine that returns labels; see `Engine`."""

    def __init__(self, classify: Classify, limits: SequenceLimits) -> None:
        super().__init__(limits)
        self._classify = classify

    def _answers(self, sequences: abc.Sequence[Sequence]) -> list[SequenceStep]:
        results = self._classify([sequence.spec.prompt for sequence in sequences])
        return [
            self._answer(sequence, values)
            for sequence, values in zip(sequences, results, strict=True)
        ]

    def _answer(self, sequence: Sequence, values: abc.Sequence[float]) -> SequenceStep:
        order = sorted(range(len(values)), key=lambda label: -values[label])
        sampling = sequence.spec.sampling
        top = tuple((label, values[label]) for label in order[: sampling.top_logprobs])
        logprobs = (TokenLogprobs(values[order[0]], top),) if sampling.logprobs else ()
        return sequence.take((order[0],), logprobs)


def _end(sequence: Sequence, values: Values) -> SequenceStep:
    if not np.isfinite(values).all():
        return sequence.end_step(SequenceEnd.FAILED, "the model's output is not a number")
    return sequence.end_with(values.astype("<f4").tobytes())


class Embedder:
    """Computes embeddings of texts."""

    def __init__(self, model: Any, pipeline: Pipeline) -> None:
        self._hidden = PaddedTexts(model, lambda output: output.last_hidden_state)
        self._pipeline = pipeline

    def __call__(self, sequences: abc.Sequence[SequenceSpec]) -> list[Values]:
        """Return the embedding of each sequence."""
        hidden = self._hidden([Text(sequence.prompt) for sequence in sequences])
        results: Values = self._pipeline(hidden).cpu().numpy()
        return [
            self._shaped(values, sequence.values or task_pb2.Values())
            for values, sequence in zip(results, sequences, strict=True)
        ]

    def _shaped(self, values: Values, wanted: task_pb2.Values) -> Values:
        cut = values[: wanted.dimensions] if wanted.dimensions else values
        has_choice = wanted.HasField("normalize")
        normalize = wanted.normalize if has_choice else self._pipeline.normalizes
        if not normalize or (cut is values and self._pipeline.normalizes):
            return cut
        return cut / max(float(np.linalg.norm(cut)), 1e-12)


class Reranker:
    """Scores pairs of texts, with a sequence classification head of one label."""

    def __init__(self, model: Any) -> None:
        self._logits = PaddedTexts(model, lambda output: output.logits[:, 0])
        self._activation = _activation(model.config)

    def __call__(self, sequences: abc.Sequence[SequenceSpec]) -> list[Values]:
        """Return the score of each sequence's pair of texts, shape [1]."""
        pairs = [
            Text(sequence.prompt, sequence.values.second_text if sequence.values else 0)
            for sequence in sequences
        ]
        scores = self._activation(torch.stack(self._logits(pairs)))
        return list(scores.cpu().numpy().reshape(-1, 1))


class TokenClassifier:
    """Computes the most probable label of every token, with a token classification head."""

    def __init__(self, model: Any) -> None:
        self._logits = PaddedTexts(model, lambda output: output.logits)

    def __call__(self, sequences: abc.Sequence[SequenceSpec]) -> list[Values]:
        """Return the number of each token's label and its probability; see `Compute`."""
        results = self._logits([Text(sequence.prompt) for sequence in sequences])
        return [_labelled(logits) for logits in results]


class SequenceClassifier:
    """A model with a sequence classification head."""

    def __init__(self, model: Any) -> None:
        self._logits = PaddedTexts(model, lambda output: output.logits)
        # Labels that do not exclude each other have independent probabilities.
        self._independent = model.config.problem_type == "multi_label_classification"

    def logprobs(self, texts: abc.Sequence[abc.Sequence[int]]) -> list[list[float]]:
        """Return the log-probabilities of each text's labels; a `Classify`."""
        logits = torch.stack(self._logits([Text(text) for text in texts]))
        normalized = functional.logsigmoid(logits) if self._independent else logits.log_softmax(-1)
        values: list[list[float]] = normalized.cpu().tolist()
        return values


def _labelled(logits: torch.Tensor) -> Values:
    chances, labels = logits.softmax(-1).max(-1)
    values: Values = torch.stack((labels.float(), chances), dim=-1).cpu().numpy()
    return values


def _activation(config: Any) -> Any:
    """Return what sentence-transformers applies to the logits: the configured activation, else the sigmoid."""
    name = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    name = name or getattr(config, "sbert_ce_default_activation_function", None) or "Sigmoid"
    kind = name.rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        supported = ", ".join(_ACTIVATIONS)
        raise SettingsError(f"the activation {name} is not served, only {supported}")
    return _ACTIVATIONS[kind]


def load_values(settings: ModelSettings) -> ValuesEngine:
    """Load the engine of an embedding model, a reranker or a token classifier, warmed up.

    Raises:
        SettingsError: It is of another kind, or has a part that is not served.
        ValueError, OSError: It cannot be read.
    """
    folder = read_sentence_folder(_folder_of(settings))
    device = find_device(settings.device)
    dtype = find_dtype(settings.dtype, device)
    compute, config = _load_compute(settings, folder, device, dtype)
    context = _context(folder, settings.context_tokens)
    engine = ValuesEngine(compute, SequenceLimits.of(settings, context), int(config.vocab_size))
    warm_up(engine, values=task_pb2.Values())
    logger.info("%s: %s on %s, context of %d tokens", settings.name, dtype, device, context)
    return engine


def load_classifier(settings: ModelSettings) -> ClassifierEngine:
    """Load the engine of a sequence classifier, warmed up.

    Raises:
        SettingsError: It has no sequence classification head, or its context is shorter than set.
        ValueError, OSError: It has no labels, or cannot be read.
    """
    path = resolve_model_path(settings.path)
    config = AutoConfig.from_pretrained(path)
    labels = labels_of({"id2label": {str(k): v for k, v in config.id2label.items()}})
    model = read_whole(AutoModelForSequenceClassification, path, dtype=torch.float32)
    context = find_context(path, config.to_dict(), settings.context_tokens)
    device = find_device(settings.device)
    judge = SequenceClassifier(model.to(device).eval())
    engine = ClassifierEngine(judge.logprobs, SequenceLimits.of(settings, context))
    warm_up(engine)
    logger.info("%s: %d labels on %s, context of %d", settings.name, len(labels), device, context)
    return engine


_MODELS: Final = {
    "embedding": AutoModel,
    "reranker": AutoModelForSequenceClassification,
    "token_classifier": AutoModelForTokenClassification,
}
"""Class of transformers for the model, by engine."""


def _load_compute(
    settings: ModelSettings, folder: SentenceFolder, device: torch.device, dtype: torch.dtype
) -> tuple[Compute, Any]:
    """Return what computes the numbers, and the configuration of its model."""
    engine, config = settings.engine, AutoConfig.from_pretrained(folder.transformer)
    if config.is_encoder_decoder:
        raise SettingsError("is an encoder-decoder model; name an encoder")
    if engine == "reranker" and config.num_labels != 1:
        raise SettingsError(
            f"a reranker has one label, this model {config.num_labels}; use engine: classifier"
        )
    pipeline = Pipeline(folder.modules, device) if engine == "embedding" else None
    unused = () if pipeline is None else ("pooler.",)
    model = read_whole(_MODELS[engine], folder.transformer, unused=unused, dtype=dtype)
    model = model.to(device).eval()
    replace_linear_layers(model, settings.quantization, decodes=False)
    if pipeline is not None:
        return Embedder(model, pipeline), config
    return Reranker(model) if engine == "reranker" else TokenClassifier(model), config


def _folder_of(settings: ModelSettings) -> Path:
    folder = Path(resolve_model_path(settings.path))
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(settings.path, allow_patterns=list(_HUB_FILES)))


def _context(folder: SentenceFolder, wanted: int | None) -> int:
    context = wanted or folder.context_tokens
    if not context:
        raise SettingsError("set context_tokens, the model names none")
    if folder.positions and context > folder.positions:
        most = folder.positions
        raise SettingsError(f"context_tokens is {context}, the model allows at most {most}")
    return context
