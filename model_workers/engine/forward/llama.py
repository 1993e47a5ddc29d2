"""The fused path: Llama and models of the same structure (Mistral, Qwen2, Qwen3, SmolLM).

The same numbers as transformers' model in fewer and larger operations: one product for queries, keys and values, one
for gate and up, the residual added inside the product, rotation in place.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from model_workers.engine.forward.attention import Attention, CachedModel, ModelInputs
from model_workers.engine.forward.flash import DecodeGraphs, FlashAttention
from model_workers.engine.forward.fused_folder import FUSED, FusedFolder
from model_workers.engine.forward.linear import Linear, PackedLinear, make_linear
from model_workers.engine.paged_model import SequenceChunk


def is_fused(model: Any) -> bool:
    """Return whether a `FusedFolder` or a model of transformers can be computed here."""
    if isinstance(model, FusedFolder):
        return True
    return type(model).__name__ in FUSED and model.config.hidden_act == "silu"


class RotaryEmbedding:
    """The rotary embedding of one step's positions, with transformers' frequencies and scaling."""

    def __init__(self, rotary: Any, like: Tensor, positions: Tensor) -> None:
        angles = positions[:, None, None] * rotary.inv_freq
        cos, sin = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
        self._half = cos.shape[-1]
        self._cos = torch.cat((cos, cos), -1).to(like.dtype)
        self._sin = torch.cat((-sin, sin), -1).to(like.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate [tokens, heads, size]: the halves (a, b) to (a cos - b sin, b cos + a sin)."""
        return (x * self._cos).addcmul_(x.roll(self._half, -1), self._sin)


class RmsNorm:
    """A root mean square norm."""

    def __init__(self, norm: Any) -> None:
        self._weight: Tensor = norm.weight.detach()
        self._epsilon: float = norm.variance_epsilon
        # In float32 on a CPU: torch computes it in more and slower operations, of bfloat16 in float32.
        self._is_wide = not self._weight.is_cuda and self._weight.dtype is torch.float32
        self._epsilons = torch.tensor(self._epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize [..., size]."""
        if self._is_wide:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            square = torch.addcmul(self._epsilons, length, length, value=1 / x.shape[-1])
            return (x * square.rsqrt_()).mul_(self._weight)
        return functional.rms_norm(x, self._weight.shape, self._weight, self._epsilon)


def join(layers: Sequence[Any], quantization: str) -> Linear:
    """Join linear layers of the same input into one, and drop their own weights, which would be a second copy."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    linear = make_linear(weight, torch.cat(biases) if biases else None, quantization)
    for layer in layers:
        layer.weight = layer.bias = None
    return linear


class FusedLayer:
    """One decoder layer's weights, taken from transformers' layer."""

    def __init__(self, layer: Any, quantization: str) -> None:
        attention, mlp = layer.self_attn, layer.mlp

        def joined(*layers: Any) -> Linear:
            return join(layers, quantization)

        self.index: int = attention.layer_idx
        self.scaling: float = attention.scaling
        self.input_norm = RmsNorm(layer.input_layernorm)
        self.qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = joined(attention.o_proj)
        self.query_norm = RmsNorm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.key_norm = RmsNorm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.mlp_norm = RmsNorm(layer.post_attention_layernorm)
        self.gate_up = joined(mlp.gate_proj, mlp.up_proj)
        self.down = joined(mlp.down_proj)


class FusedModel(CachedModel):
    """A model of the fused path; see `PagedModel`. Takes the weights from `model`."""

    def __init__(
        self, model: Any, attention: Attention, context_tokens: int, quantization: str = "none"
    ) -> None:
        super().__init__(attention, context_tokens, int(model.config.vocab_size))
        self._shape = attention.cache.shapes[0]
        self._embedding = model.model.embed_tokens.weight.detach()
        self._rotary = model.model.rotary_emb
        self._head = make_linear(model.lm_head.weight, model.lm_head.bias)
        self._layers = [FusedLayer(layer, quantization) for layer in model.model.layers]
        self._norm = RmsNorm(model.model.norm)
        self._graphs: DecodeGraphs | None = None
        if isinstance(attention, FlashAttention):
            self._graphs = DecodeGraphs(attention, self._compute, context_tokens)

    @torch.inference_mode()
    @override
    def forward(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        if self._graphs is not None:
            return self._graphs.run(chunks)
        return self._compute(self._attention.begin(chunks))

    @torch.inference_mode()
    def capture_graphs(self, tokens: int) -> None:
        """Capture steps of up to `tokens` tokens where the device has graphs."""
        if self._graphs is not None:
            self._graphs.capture(tokens)

    def _compute(self, inputs: ModelInputs) -> Tensor:
        tokens, positions = self._known(inputs.tokens), inputs.positions
        count = len(tokens)
        if count == 1 and isinstance(self._head, PackedLinear):
            # Such layers compute a single row twice (see linear.py); doubling it once is cheaper.
            tokens, positions = tokens.expand(2), positions.expand(2)
        hidden = functional.embedding(tokens, self._embedding)
        rotate = RotaryEmbedding(self._rotary, hidden, positions)
        for layer in self._layers:
            hidden = self._attended(layer, hidden, rotate, count)
            hidden = self._transformed(layer, hidden)
        wanted = self._norm(hidden.index_select(0, inputs.wanted))
        logits: Tensor = self._head(wanted)
        return logits.float()

    def _attended(
        self, layer: FusedLayer, hidden: Tensor, rotate: RotaryEmbedding, count: int
    ) -> Tensor:
        shape = self._shape
        qkv = layer.qkv(layer.input_norm(hidden)).view(len(hidden), -1, shape.key_size)
        rotated = shape.heads + shape.kv_heads
        if layer.query_norm and layer.key_norm:
            normed = (
                layer.query_norm(qkv[:, : shape.heads]),
                layer.key_norm(qkv[:, shape.heads : rotated]),
            )
            query_key = rotate(torch.cat(normed, 1))
        else:
            query_key = rotate(qkv[:, :rotated])
        answers = self._attention.attend(
            layer.index,
            query_key[:count, : shape.heads],
            query_key[:count, shape.heads :],
            qkv[:count, rotated:],
            scaling=layer.scaling,
        )
        flat = answers.reshape(count, -1).expand(len(hidden), -1)
        return layer.out.add(flat, hidden)

    def _transformed(self, layer: FusedLayer, hidden: Tensor) -> Tensor:
        gate, up = layer.gate_up.halves(layer.mlp_norm(hidden))
        return layer.down.add(functional.silu(gate).mul_(up), hidden)
