"""`Classifier` of a model folder with a sequence classification head, by transformers' own model code."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from model_workers.engine.classifier import ClassifierEngine
from model_workers.engine.protocol import RowSpec, Sampling
from model_workers.engine.roster import Limits
from sluice.settings import ModelSettings, SettingsError, resolve_model_path
from sluice.settings.models import labels_of

log = logging.getLogger(__name__)


class SequenceClassifier:
    """See `Classifier`."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model.to(device).eval()
        self._device = device
        self._pad = int(model.config.pad_token_id or 0)
        # Where labels do not exclude each other each has a probability of its own.
        self._apart = model.config.problem_type == "multi_label_classification"

    @torch.inference_mode()
    def logprobs(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `Classifier.logprobs`."""
        longest = max(len(text) for text in texts)
        ids = torch.full((len(texts), longest), self._pad, dtype=torch.long)
        mask = torch.zeros((len(texts), longest), dtype=torch.long)
        for place, text in enumerate(texts):
            ids[place, : len(text)] = torch.tensor(text, dtype=torch.long)
            mask[place, : len(text)] = 1
        inputs = {"input_ids": ids.to(self._device), "attention_mask": mask.to(self._device)}
        logits = self._model(**inputs).logits.float()
        judge = torch.nn.functional.logsigmoid if self._apart else _log_softmax
        values: list[list[float]] = judge(logits).cpu().tolist()
        return values


def load_classifier(settings: ModelSettings) -> ClassifierEngine:
    """The engine of a folder or hub id, warmed up.

    Raises:
        SettingsError: it has no sequence classification head or no labels, or its context is smaller than asked for.
    """
    path = resolve_model_path(settings.path)
    try:
        config = AutoConfig.from_pretrained(path)
        labels = labels_of({"id2label": {str(k): v for k, v in config.id2label.items()}})
        model: Any = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    except (ValueError, OSError) as error:
        raise SettingsError(f"models: {settings.name}: {Path(path).name}: {error}") from error
    context = _context(settings, config)
    device = torch.device(_device(settings.device))
    limits = Limits(settings.slots, settings.max_waiting_rows, context, settings.prefill_tokens)
    engine = ClassifierEngine(SequenceClassifier(model, device), limits)
    engine.add(RowSpec("warm-up", "", 0, (0, 0), (), Sampling(max_tokens=1)), 0.0)
    while engine.has_rows():
        engine.step(0.0)
    log.info("%s: %d labels on %s, context of %d", settings.name, len(labels), device, context)
    return engine


def _context(settings: ModelSettings, config: Any) -> int:
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None and settings.context_tokens is None:
        raise SettingsError(f"models: {settings.name}: context_tokens: the model does not say it")
    if longest is not None and (settings.context_tokens or 0) > longest:
        raise SettingsError(
            f"models: {settings.name}: context_tokens: the model has room for {longest}"
        )
    return int(settings.context_tokens or longest or 0)


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, dim=-1)
