"""Whole texts through a model of transformers: packed one after the other, or padded in groups of similar length.

On a CPU texts are packed: every layer but attention computes all tokens of a step in one product, and attention runs
text by text, so that nothing is padded. A trial at load shows whether a model's code allows it: the numbers must be
those of each text alone. Models with their own attention code, and models on GPUs, where a kernel per text would cost
more than padding, get groups of similar length.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from sluice.settings import SettingsError

ATTENTION: Final = "sluice_packed"
"""Name of our function in transformers' registry. It has no mask function, so that models make no mask."""
PADDING_MAX: Final = 0.1
"""Maximum share of padding in a group."""
TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Maximum difference between packed texts and each text alone, in the trial at load."""
_TRIAL: Final = (7, 3, 12)
"""Lengths of the trial's texts."""

logger = logging.getLogger(__name__)


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


Hidden = Callable[[Sequence[Text]], list[Tensor]]
"""Computes the last hidden states of each text, [tokens, size], float32."""

_spans: ContextVar[Sequence[tuple[int, int]]] = ContextVar("spans")


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention of one layer for transformers, with [1, heads, tokens, size]; each text sees only itself."""
    if attention_mask is not None or others.get("softcap"):
        raise SettingsError(f"{type(module).__name__}: attention takes more than keys and values")
    causal = bool(others.get("is_causal") or getattr(module, "is_causal", False))
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    answers = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    for start, end in _spans.get():
        mask = _window_mask(end - start, sliding_window, causal)
        part = functional.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            attn_mask=mask,
            is_causal=causal and mask is None,
            scale=scaling,
        )
        answers[:, start:end] = part.transpose(1, 2)
    return answers, None


def _window_mask(tokens: int, window: int | None, causal: bool) -> Tensor | None:
    """Return the keys that each query sees; None: all. transformers' window counts the query itself."""
    if window is None or tokens <= window:
        return None
    place = torch.arange(tokens)
    distance = place[:, None] - place
    visible = distance.abs() < window
    return visible & (distance >= 0) if causal else visible


AttentionInterface.register(ATTENTION, packed_attention)


class PackedTexts:
    """Computes hidden states of packed texts; `model` was loaded with `ATTENTION`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._has_types = _has_types(model)
        self._offset = _first_position(model)

    @torch.inference_mode()
    def __call__(self, texts: Sequence[Text]) -> list[Tensor]:
        """Return the last hidden states of packed texts; a `Hidden`."""
        spans = list(_spans_of(texts))
        inputs = {
            "input_ids": _row(token for text in texts for token in text.tokens),
            "position_ids": _row(
                place + self._offset for start, end in spans for place in range(end - start)
            ),
        }
        if self._has_types:
            inputs["token_type_ids"] = _row(kind for text in texts for kind in text.types)
        token = _spans.set(spans)
        try:
            hidden = self._model(**inputs).last_hidden_state[0].float()
        finally:
            _spans.reset(token)
        return [hidden[start:end] for start, end in spans]


class PaddedTexts:
    """Runs a model on texts in padded groups; `output` selects from the model's output."""

    def __init__(self, model: Any, output: Callable[[Any], Tensor]) -> None:
        self._model = model
        self._output = output
        self._pad = int(getattr(model.config, "pad_token_id", None) or 0)
        self._has_types = _has_types(model)

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


def hidden_of(model: Any) -> Hidden:
    """Return the fastest way to compute hidden states with `model`, a base model of transformers."""
    padded = PaddedTexts(model, lambda output: output.last_hidden_state)
    if model.device.type != "cpu":
        return padded
    texts = [Text([1 + place % 5 for place in range(size)]) for size in _TRIAL]
    alone = [padded([text])[0] for text in texts]
    try:
        model.set_attn_implementation(ATTENTION)
        packed = PackedTexts(model)
        differs = max(float((a - b).abs().max()) for a, b in zip(packed(texts), alone, strict=True))
        if differs <= TOLERANCE[model.dtype]:
            return packed
        reason = f"numbers differ by {differs:.2g}"
    except Exception as error:  # model code of any kind; the other way is there for it
        reason = f"{type(error).__name__}: {error}"
    logger.info("%s: texts are padded, not packed: %s", type(model).__name__, reason)
    _use_default_attention(model)
    return padded


def _use_default_attention(model: Any) -> None:
    """Use the attention that transformers chooses: torch's where the model's code allows it."""
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:
        model.set_attn_implementation("eager")


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


def _has_types(model: Any) -> bool:
    accepted = inspect.signature(model.forward).parameters
    return (
        "token_type_ids" in accepted and (getattr(model.config, "type_vocab_size", None) or 0) > 1
    )


def _first_position(model: Any) -> int:
    """Return the first position: RoBERTa and similar models count from behind that of padding."""
    embeddings: Any = getattr(model, "embeddings", None)
    counts_on = hasattr(embeddings, "create_position_ids_from_input_ids")
    return int(embeddings.padding_idx) + 1 if counts_on else 0


def _spans_of(texts: Sequence[Text]) -> Iterator[tuple[int, int]]:
    start = 0
    for text in texts:
        yield start, start + len(text.tokens)
        start += len(text.tokens)


def _row(values: Iterator[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.long)[None]
