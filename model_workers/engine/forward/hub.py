"""Any decoder-only model of transformers over the paged cache, through transformers' attention interface."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.pytorch_utils import Conv1D

from model_workers.engine.batch import Chunk
from model_workers.engine.forward.attention import Attention, Inputs
from model_workers.engine.forward.linear import make_linear
from model_workers.engine.forward.pages import LayerShape
from sluice.settings import SettingsError

ATTENTION: Final = "sluice_paged"
"""The name of our function in transformers' registry. No mask function has it, so models make no mask."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a layer asks of attention; tensors as in `Attention.attend`."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    softcap: float | None
    window: int | None


_answer: ContextVar[Callable[[Asked], Tensor]] = ContextVar("answer")


def attention_function(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer, with [1, heads, tokens, size]."""
    more = {name for name, thing in others.items() if isinstance(thing, Tensor)} - {"position_ids"}
    if attention_mask is not None or more:
        raise SettingsError(f"{type(module).__name__}: attention takes more than keys and values")
    if not (others.get("is_causal") or getattr(module, "is_causal", True)):
        raise SettingsError(f"{type(module).__name__}: attention looks ahead")
    asked = Asked(
        layer=module.layer_idx,
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        window=sliding_window,
    )
    return _answer.get()(asked)[None], None


AttentionInterface.register(ATTENTION, attention_function)


def run(model: Any, answer: Callable[[Asked], Tensor], inputs: Inputs) -> Tensor:
    """Logits [wanted, vocabulary] of packed tokens; each layer's attention is what ``answer`` says."""
    token = _answer.set(answer)
    try:
        output = model(
            input_ids=inputs.tokens[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            logits_to_keep=inputs.wanted,
        )
    finally:
        _answer.reset(token)
    logits: Tensor = output.logits
    return logits[0]


def layer_shapes(model: Any) -> list[LayerShape]:
    """What each layer of a model keeps, found by running it on one token.

    Raises:
        SettingsError: not every layer attends through the interface.
    """
    shapes: dict[int, LayerShape] = {}

    def note(asked: Asked) -> Tensor:
        heads, kv_heads = asked.query.shape[1], asked.key.shape[1]
        sizes = asked.key.shape[2], asked.value.shape[2]
        shapes[asked.layer] = LayerShape(heads, kv_heads, *sizes, asked.window, asked.softcap)
        return asked.value.repeat_interleave(heads // kv_heads, 1)  # a token that sees only itself

    zero = torch.zeros(1, dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            run(model, note, Inputs(zero, zero, zero))
    except SettingsError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # What models do that have attention of their own and miss the mask they are used to.
        raise SettingsError(f"{type(model).__name__}: does not run without a mask") from error
    if sorted(shapes) != list(range(model.config.num_hidden_layers)):
        raise SettingsError(f"{type(model).__name__}: not every layer keeps keys and values")
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(shapes)
    for layer, kind in enumerate(kinds):
        if kind == "sliding_attention" and shapes[layer].window is None:
            raise SettingsError(f"{type(model).__name__}: layer {layer} does not tell its window")
    return [shapes[layer] for layer in sorted(shapes)]


def replace_linear_layers(model: Any, quantization: str) -> None:
    """Makes a model's linear layers ours (`make_linear`), in place. The output layer is never quantized."""
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (nn.Linear, Conv1D):
                weight = child.weight.T if type(child) is Conv1D else child.weight
                kind = "none" if child is head else quantization
                setattr(parent, name, make_linear(weight, child.bias, kind))


class HubModel:
    """See `PagedModel`. ``model`` was loaded with `ATTENTION`."""

    def __init__(self, model: Any, attention: Attention, context_tokens: int) -> None:
        self.block_tokens = attention.pages.block_tokens
        self.num_blocks = attention.pages.num_blocks
        self.context_tokens = context_tokens
        self.vocab_size = int(model.config.vocab_size)
        self._model = model
        self._attention = attention

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """See `PagedModel.forward`."""
        inputs = self._attention.begin(chunks)
        return run(self._model, self._answer, inputs).float()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `PagedModel.copy_blocks`."""
        if pairs:
            self._attention.pages.copy(pairs)

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """See `PagedModel.clear_blocks`."""
        if blocks:
            self._attention.pages.clear(blocks)

    def _answer(self, asked: Asked) -> Tensor:
        return self._attention.attend(
            asked.layer,
            asked.query,
            asked.key,
            asked.value,
            scaling=asked.scaling,
        )
