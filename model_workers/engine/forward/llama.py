"""The fused path: Llama and the models built like it (Mistral, Qwen2, Qwen3, SmolLM).

The same numbers as transformers' model in fewer and larger operations: one product for queries, keys and values, one
for gate and up, the residual added inside the product, rotation in place.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from model_workers.engine.batch import Chunk
from model_workers.engine.forward.attention import Attention, Inputs
from model_workers.engine.forward.flash import FlashAttention
from model_workers.engine.forward.graphs import DecodeGraphs
from model_workers.engine.forward.linear import Linear, PackedLinear, make_linear

FUSED: Final = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
"""Classes of transformers that this computes."""


def is_fused(model: Any) -> bool:
    """Whether a model of transformers can be computed here."""
    return type(model).__name__ in FUSED and model.config.hidden_act == "silu"


class Layer:
    """One decoder layer's weights, taken out of transformers' layer."""

    def __init__(self, layer: Any, quantization: str) -> None:
        attention, mlp = layer.self_attn, layer.mlp

        def joined(*layers: Any) -> Linear:
            return join(layers, quantization)

        self.index: int = attention.layer_idx
        self.scaling: float = attention.scaling
        self.input_norm = Norm(layer.input_layernorm)
        self.qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = joined(attention.o_proj)
        self.query_norm = Norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.key_norm = Norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.mlp_norm = Norm(layer.post_attention_layernorm)
        self.gate_up = joined(mlp.gate_proj, mlp.up_proj)
        self.down = joined(mlp.down_proj)


class Norm:
    """A root mean square norm."""

    def __init__(self, norm: Any) -> None:
        self._weight: Tensor = norm.weight.detach()
        self._epsilon: float = norm.variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        """Norms [..., size]."""
        return functional.rms_norm(x, self._weight.shape, self._weight, self._epsilon)


def join(layers: Sequence[Any], quantization: str) -> Linear:
    """Linear layers of the same input as one. Their own weights are given back: they would be a second copy."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    linear = make_linear(weight, torch.cat(biases) if biases else None, quantization)
    for layer in layers:
        layer.weight = layer.bias = None
    return linear


class FusedModel:
    """See `PagedModel`. Takes the weights out of ``model``."""

    def __init__(
        self, model: Any, attention: Attention, context_tokens: int, quantization: str = "none"
    ) -> None:
        self.block_tokens = attention.pages.block_tokens
        self.num_blocks = attention.pages.num_blocks
        self.context_tokens = context_tokens
        self.vocab_size = int(model.config.vocab_size)
        self._attention = attention
        self._shape = attention.pages.shapes[0]
        self._embedding = model.model.embed_tokens.weight.detach()
        self._rotary = model.model.rotary_emb
        self._head = make_linear(model.lm_head.weight, model.lm_head.bias)
        self._layers = [Layer(layer, quantization) for layer in model.model.layers]
        self._norm = Norm(model.model.norm)
        self._graphs: DecodeGraphs | None = None
        if isinstance(attention, FlashAttention):
            self._graphs = DecodeGraphs(attention, self._compute, context_tokens)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """See `PagedModel.forward`."""
        logits = self._graphs.run(chunks) if self._graphs else None
        if logits is not None:
            return logits
        return self._compute(self._attention.begin(chunks))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `PagedModel.copy_blocks`."""
        if pairs:
            self._attention.pages.copy(pairs)

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """See `PagedModel.clear_blocks`."""
        if blocks:
            self._attention.pages.clear(blocks)

    def _compute(self, inputs: Inputs) -> Tensor:
        tokens, positions = inputs.tokens, inputs.positions
        count = len(tokens)
        if count == 1 and isinstance(self._head, PackedLinear):
            # Such layers compute a single row twice (linear.py says why); doubling it once is cheaper.
            tokens, positions = tokens.expand(2), positions.expand(2)
        hidden = functional.embedding(tokens, self._embedding)
        turn = Rotation(self._rotary, hidden, positions)
        for layer in self._layers:
            hidden = self._attended(layer, hidden, turn, count)
            hidden = self._transformed(layer, hidden)
        wanted = self._norm(hidden.index_select(0, inputs.wanted))
        logits: Tensor = self._head(wanted)
        return logits.float()

    def _attended(self, layer: Layer, hidden: Tensor, turn: "Rotation", count: int) -> Tensor:
        shape = self._shape
        qkv = layer.qkv(layer.input_norm(hidden)).view(len(hidden), -1, shape.key_size)
        turned = shape.heads + shape.kv_heads
        if layer.query_norm and layer.key_norm:
            normed = (
                layer.query_norm(qkv[:, : shape.heads]),
                layer.key_norm(qkv[:, shape.heads : turned]),
            )
            query_key = turn(torch.cat(normed, 1))
        else:
            query_key = turn(qkv[:, :turned])
        answers = self._attention.attend(
            layer.index,
            query_key[:count, : shape.heads],
            query_key[:count, shape.heads :],
            qkv[:count, turned:],
            scaling=layer.scaling,
        )
        flat = answers.reshape(count, -1).expand(len(hidden), -1)
        return layer.out.add(flat, hidden)

    def _transformed(self, layer: Layer, hidden: Tensor) -> Tensor:
        gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, -1)
        return layer.down.add(functional.silu(gate).mul_(up), hidden)


class Rotation:
    """The rotary embedding of one step's positions; frequencies and scaling are transformers' own."""

    def __init__(self, rotary: Any, like: Tensor, positions: Tensor) -> None:
        angles = positions[:, None, None] * rotary.inv_freq
        cos, sin = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
        self._half = cos.shape[-1]
        self._cos = torch.cat((cos, cos), -1).to(like.dtype)
        self._sin = sin.to(like.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Turns [tokens, heads, size]: the halves (a, b) to (a cos - b sin, b cos + a sin)."""
        turned = x * self._cos
        turned[..., : self._half].addcmul_(x[..., self._half :], self._sin, value=-1)
        turned[..., self._half :].addcmul_(x[..., : self._half], self._sin)
        return turned
