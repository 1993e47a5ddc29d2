"""Whole texts through a model of transformers, padded in groups of similar length."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

PADDING_MAX: Final = 0.1
"""Maximum share of padding in a group."""


class PaddedTexts:
    """Runs a model on texts in padded groups; `output` selects from the model's output."""

    def __init__(self, model: Any, output: Callable[[Any], Tensor]) -> None:
        self._model = model
        self._output = output
        self._pad = int(getattr(model.config, "pad_token_id", None) or 0)
        accepted = inspect.signature(model.forward).parameters
        types = getattr(model.config, "type_vocab_size", None) or 0
        self._has_types = "token_type_ids" in accepted and types > 1

    @torch.inference_mode()
    def __call__(self, texts: Sequence[Sequence[int]], seconds: Sequence[int] = ()) -> list[Tensor]:
        """Return the output of each text, float32, without the positions of padding.

        Args:
            texts: The tokens of texts, or of pairs of texts.
            seconds: Of pairs, the index of the first token of the second text; 0: there is one text.
        """
        seconds = seconds or [0] * len(texts)
        output_of: dict[int, Tensor] = {}
        for group in group_by_length([len(text) for text in texts]):
            chosen = [(texts[place], seconds[place]) for place in group]
            outputs = self._output(self._run(chosen)).float()
            for place, output in zip(group, outputs, strict=True):
                output_of[place] = output[: len(texts[place])] if output.dim() > 1 else output
        return [output_of[place] for place in range(len(texts))]

    def _run(self, texts: Sequence[tuple[Sequence[int], int]]) -> Any:
        shape = len(texts), max(len(text) for text, _ in texts)
        ids = torch.full(shape, self._pad, dtype=torch.long)
        mask, types = torch.zeros_like(ids), torch.zeros_like(ids)
        for place, (text, second) in enumerate(texts):
            size = len(text)
            ids[place, :size] = torch.tensor(text)
            types[place, second or size : size] = 1
            mask[place, :size] = 1
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self._has_types:
            inputs["token_type_ids"] = types
        device = self._model.device
        return self._model(**{name: tensor.to(device) for name, tensor in inputs.items()})


def group_by_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield indices of `lengths`, longest first, in groups with a share of padding of at most `PADDING_MAX`."""
    group: list[int] = []
    tokens = 0
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        # If this text joins, each row is as long as the first of the group, which is its longest.
        cells = (len(group) + 1) * lengths[group[0]] if group else lengths[place]
        if cells - tokens - lengths[place] > PADDING_MAX * cells:
            yield group
            group, tokens = [], 0
        group.append(place)
        tokens += lengths[place]
    yield group
