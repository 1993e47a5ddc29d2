"""Engines of models that read a whole text at once, on transformers' own model code.

Most return numbers: embeddings, scores of pairs (rerankers), labels of tokens (NER). A sequence classifier answers with
the number of the best label as its only token, and if asked the log-probabilities of the best ones, so that no other
message is needed.
"""

import logging
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
from model_workers.engine.forward.encoder import PaddedTexts
from model_workers.engine.forward.hub import replace_linear_layers
from model_workers.engine.forward.load import find_context
from model_workers.engine.forward.pooling import Pipeline, activation_of
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

_HUB_FILES: Final = ("*.json", "*/*.json", "*.txt", "*.safetensors", "*/*.safetensors")
"""Files that are fetched for a hub id."""

logger = logging.getLogger(__name__)


class ValuesEngine(WholeTextEngine):
    """An engine that returns numbers; see `Engine`."""

    def __init__(self, compute: Compute, limits: SequenceLimits, vocab_size: int) -> None:
        # Nothing is drawn: a text may fill the context.
        context = limits.context_tokens + 1
        super().__init__(replace(limits, context_tokens=context, vocab_size=vocab_size))
        self._compute = compute

    @override
    def add(self, sequence: SequenceSpec, now: float) -> None:
        if sequence.values is None or sequence.values.scored_token_ids:
            raise InvalidRequest(
                "this model gives no tokens; ask for an embedding or a score of texts"
            )
        super().add(sequence, now)

    def _answers(self, sequences: abc.Sequence[Sequence]) -> list[SequenceStep]:
        results = self._compute([sequence.spec for sequence in sequences])
        return [_end(sequence, values) for sequence, values in zip(sequences, results, strict=True)]


def _end(sequence: Sequence, values: Values) -> SequenceStep:
    if not np.isfinite(values).all():
        return sequence.end_step(SequenceEnd.FAILED, "the model's output is not a number")
    return sequence.end_with(values.astype("<f4").tobytes())


class ClassifierEngine(WholeTextEngine):
    """An engine that returns labels, by a sequence classification head; see `Engine`."""

    def __init__(self, model: Any, limits: SequenceLimits) -> None:
        super().__init__(limits)
        self._logits = PaddedTexts(model, lambda output: output.logits)
        # Labels that do not exclude each other have independent probabilities.
        independent = model.config.problem_type == "multi_label_classification"
        self._logprobs = (
            functional.logsigmoid if independent else partial(torch.log_softmax, dim=-1)
        )

    def _answers(self, sequences: abc.Sequence[Sequence]) -> list[SequenceStep]:
        logits = torch.stack(self._logits([one.spec.prompt for one in sequences]))
        pairs = zip(sequences, self._logprobs(logits).cpu().tolist(), strict=True)
        return [self._answer(sequence, values) for sequence, values in pairs]

    def _answer(self, sequence: Sequence, values: abc.Sequence[float]) -> SequenceStep:
        order = sorted(range(len(values)), key=lambda label: -values[label])
        sampling = sequence.spec.sampling
        top = tuple((label, values[label]) for label in order[: sampling.top_logprobs])
        logprobs = (TokenLogprobs(values[order[0]], top),) if sampling.logprobs else ()
        return sequence.take((order[0],), logprobs)


def _embedder(model: Any, pipeline: Pipeline) -> Compute:
    """Return what computes the embedding of each sequence."""
    hidden_of = PaddedTexts(model, lambda output: output.last_hidden_state)

    def shaped(values: Values, options: task_pb2.Values) -> Values:
        cut = values[: options.dimensions] if options.dimensions else values
        has_choice = options.HasField("normalize")
        normalize = options.normalize if has_choice else pipeline.normalizes
        if not normalize or (cut is values and pipeline.normalizes):
            return cut
        return cut / max(float(np.linalg.norm(cut)), 1e-12)

    def compute(sequences: abc.Sequence[SequenceSpec]) -> list[Values]:
        results: Values = pipeline(hidden_of([one.prompt for one in sequences])).cpu().numpy()
        pairs = zip(results, sequences, strict=True)
        return [shaped(values, one.values or task_pb2.Values()) for values, one in pairs]

    return compute


def _reranker(model: Any) -> Compute:
    """Return what scores the pair of texts of each sequence, by a head of one label."""
    logits_of = PaddedTexts(model, lambda output: output.logits[:, 0])
    activation = _activation(model.config)

    def compute(sequences: abc.Sequence[SequenceSpec]) -> list[Values]:
        seconds = [one.values.second_text if one.values else 0 for one in sequences]
        scores = activation(torch.stack(logits_of([one.prompt for one in sequences], seconds)))
        return list(scores.cpu().numpy().reshape(-1, 1))

    return compute


def _token_classifier(model: Any) -> Compute:
    """Return what computes the number of each token's most probable label, and its probability."""
    logits_of = PaddedTexts(model, lambda output: output.logits)

    def labelled(logits: torch.Tensor) -> Values:
        chances, labels = logits.softmax(-1).max(-1)
        values: Values = torch.stack((labels.float(), chances), dim=-1).cpu().numpy()
        return values

    def compute(sequences: abc.Sequence[SequenceSpec]) -> list[Values]:
        return [labelled(logits) for logits in logits_of([one.prompt for one in sequences])]

    return compute


def _activation(config: Any) -> Any:
    """Return what sentence-transformers applies to the logits: the configured activation, else the sigmoid."""
    name = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    name = name or getattr(config, "sbert_ce_default_activation_function", None) or "Sigmoid"
    return activation_of(name)


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
    engine = ClassifierEngine(model.to(device).eval(), SequenceLimits.of(settings, context))
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
        return _embedder(model, pipeline), config
    return _reranker(model) if engine == "reranker" else _token_classifier(model), config


def _folder_of(settings: ModelSettings) -> Path:
    folder = Path(resolve_model_path(settings.path))
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(settings.path, allow_patterns=list(_HUB_FILES)))


def _context(folder: SentenceFolder, tokens: int | None) -> int:
    context = tokens or folder.context_tokens
    if not context:
        raise SettingsError("set context_tokens, the model names none")
    if folder.positions and context > folder.positions:
        most = folder.positions
        raise SettingsError(f"context_tokens is {context}, the model allows at most {most}")
    return context
