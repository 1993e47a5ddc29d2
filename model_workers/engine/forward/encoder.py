"""Whole texts through a model of transformers, padded in groups of similar length."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

PADDING_MAX: Final = 0.1
"""Maximum share of padding in a group."""


@dataclass(frozen=True, slots=True)
class Text:
    """The tokens of a text, or of a pair of texts.

    Attributes:
        second: Index of the first token of the second text; 0: there is one text.
    """

    tokens: Sequence[int]
    second: int = 0

    @property
    def types(self) -> list[int]:
        """Token types: 0, and 1 in the second text."""
        first = self.second or len(self.tokens)
        return [0] * first + [1] * (len(self.tokens) - first)


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
    def __call__(self, texts: Sequence[Text]) -> list[Tensor]:
        """Return the output of each text, float32, without the positions of padding."""
        output_of: dict[int, Tensor] = {}
        for group in groups([len(text.tokens) for text in texts]):
            outputs = self._output(self._run([texts[place] for place in group])).float()
            for place, output in zip(group, outputs, strict=True):
                output_of[place] = (
                    output[: len(texts[place].tokens)] if output.dim() > 1 else output
                )
        return [output_of[place] for place in range(len(texts))]

    def _run(self, texts: Sequence[Text]) -> Any:
        shape = len(texts), max(len(text.tokens) for text in texts)
        ids = torch.full(shape, self._pad, dtype=torch.long)
        mask, types = torch.zeros_like(ids), torch.zeros_like(ids)
        for place, text in enumerate(texts):
            size = len(text.tokens)
            ids[place, :size] = torch.tensor(text.tokens)
            types[place, :size] = torch.tensor(text.types)
            mask[place, :size] = 1
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self._has_types:
            inputs["token_type_ids"] = types
        device = self._model.device
        return self._model(**{name: tensor.to(device) for name, tensor in inputs.items()})


def groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield indices of `lengths` in groups with a share of padding of at most `PADDING_MAX`."""
    group: list[int] = []
    tokens = 0
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        # The first of a group is its longest.
        cells = (len(group) + 1) * lengths[group[0]] if group else lengths[place]
        if cells - tokens - lengths[place] > PADDING_MAX * cells:
            yield group
            group, tokens = [], 0
        group.append(place)
        tokens += lengths[place]
    yield group
