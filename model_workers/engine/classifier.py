"""The engine of sequence classifiers, on transformers' own model code: a row answers with the number of its best label.

Its log-probabilities are those of all labels, so no other message is needed.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForSequenceClassification

from model_workers.engine.cacheless import WholeTextEngine
from model_workers.engine.devices import find_device
from model_workers.engine.forward.encoder import PaddedTexts, Text
from model_workers.engine.forward.load import find_context
from model_workers.engine.protocol import RowStep, TokenLogprobs, warm_up
from model_workers.engine.rows import Row, RowLimits
from model_workers.engine.weights import read_whole
from sluice.settings import ModelSettings, resolve_model_path
from sluice.settings.models import labels_of

Classify = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[float]]]
"""Natural log-probability of every label, for each text."""


class ClassifierEngine(WholeTextEngine):
    """Rows in, labels out; see `Engine`."""

    def __init__(self, classify: Classify, limits: RowLimits) -> None:
        super().__init__(limits)
        self._classify = classify

    def _answers(self, rows: Sequence[Row]) -> list[RowStep]:
        found = self._classify([row.spec.prompt for row in rows])
        return [self._answer(row, values) for row, values in zip(rows, found, strict=True)]

    def _answer(self, row: Row, values: Sequence[float]) -> RowStep:
        order = sorted(range(len(values)), key=lambda label: -values[label])
        asked = row.spec.sampling
        top = tuple((label, values[label]) for label in order[: asked.top_logprobs])
        logprobs = (TokenLogprobs(values[order[0]], top),) if asked.logprobs else ()
        return row.take((order[0],), logprobs)


log = logging.getLogger(__name__)


class SequenceClassifier:
    """A model with a sequence classification head."""

    def __init__(self, model: Any) -> None:
        self._logits = PaddedTexts(model, lambda output: output.logits)
        # Labels that do not exclude each other have independent probabilities.
        self._independent = model.config.problem_type == "multi_label_classification"

    def logprobs(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """The log-probabilities of each text's labels; it is a `Classify`."""
        logits = torch.stack(self._logits([Text(text) for text in texts]))
        normalized = functional.logsigmoid(logits) if self._independent else logits.log_softmax(-1)
        values: list[list[float]] = normalized.cpu().tolist()
        return values


def load_classifier(settings: ModelSettings) -> ClassifierEngine:
    """The engine of a folder or hub id, warmed up.

    Raises:
        SettingsError: it has no sequence classification head, or its context is smaller than asked for.
        ValueError, OSError: it has no labels, or cannot be read.
    """
    path = resolve_model_path(settings.path)
    config = AutoConfig.from_pretrained(path)
    labels = labels_of({"id2label": {str(k): v for k, v in config.id2label.items()}})
    model = read_whole(AutoModelForSequenceClassification, path, dtype=torch.float32)
    context = find_context(path, config.to_dict(), settings.context_tokens)
    device = find_device(settings.device)
    judge = SequenceClassifier(model.to(device).eval())
    engine = ClassifierEngine(judge.logprobs, RowLimits.of(settings, context))
    warm_up(engine)
    log.info("%s: %d labels on %s, context of %d", settings.name, len(labels), device, context)
    return engine
