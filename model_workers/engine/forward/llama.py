"""The fused path: Llama and models of the same structure (Mistral, Qwen2, Qwen3, SmolLM).

The same numbers as transformers' model in fewer and larger operations: one product for queries, keys and values, one
for gate and up, the residual added inside the product, rotation in place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from model_workers.engine.forward.attention import Attention, CachedModel, ModelInputs
from model_workers.engine.forward.flash import DecodeGraphs, FlashAttention
from model_workers.engine.forward.fused_folder import FusedWeights
from model_workers.engine.forward.linear import Linear, PackedLinear, make_linear
from model_workers.engine.paged_model import SequenceChunk


class RotaryEmbedding:
    """The rotary embedding of one step's positions, with transformers' frequencies and scale."""

    def __init__(self, inv_freq: Tensor, scale: float, like: Tensor, positions: Tensor) -> None:
        angles = positions[:, None, None] * inv_freq
        cos, sin = angles.cos() * scale, angles.sin() * scale
        self._half = cos.shape[-1]
        self._cos = torch.cat((cos, cos), -1).to(like.dtype)
        self._sin = torch.cat((-sin, sin), -1).to(like.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate [tokens, heads, size]: the halves (a, b) to (a cos - b sin, b cos + a sin)."""
        return (x * self._cos).addcmul_(x.roll(self._half, -1), self._sin)


class RmsNorm:
    """A root mean square norm."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self._weight, self._epsilon = weight, epsilon
        # torch's own norm takes more and slower operations for float32 on a CPU; it computes bfloat16 in float32.
        self._is_wide = not self._weight.is_cuda and self._weight.dtype is torch.float32
        self._epsilons = torch.tensor(self._epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize [..., size]."""
        if self._is_wide:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            square = torch.addcmul(self._epsilons, length, length, value=1 / x.shape[-1])
            return (x * square.rsqrt_()).mul_(self._weight)
        return functional.rms_norm(x, self._weight.shape, self._weight, self._epsilon)


class FusedLayer:
    """One decoder layer, which takes its weights out of `weights`."""

    def __init__(self, weights: FusedWeights, index: int, quantization: str) -> None:
        tensors, prefix = weights.tensors, f"model.layers.{index}."

        def linear(*names: str) -> Linear:
            """Join linear layers of the same input into one."""
            weight = torch.cat([tensors.pop(f"{prefix}{name}.weight") for name in names])
            candidates = [tensors.pop(f"{prefix}{name}.bias", None) for name in names]
            biases = [bias for bias in candidates if bias is not None]
            return make_linear(weight, torch.cat(biases) if biases else None, quantization)

        def norm(name: str) -> RmsNorm:
            return RmsNorm(tensors.pop(f"{prefix}{name}.weight"), weights.config["rms_norm_eps"])

        self.index = index
        self.input_norm = norm("input_layernorm")
        self.mlp_norm = norm("post_attention_layernorm")
        self.qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.out = linear("self_attn.o_proj")
        self.has_head_norms = f"{prefix}self_attn.q_norm.weight" in tensors
        if self.has_head_norms:
            self.query_norm, self.key_norm = norm("self_attn.q_norm"), norm("self_attn.k_norm")
        self.gate_up = linear("mlp.gate_proj", "mlp.up_proj")
        self.down = linear("mlp.down_proj")


class FusedModel(CachedModel):
    """A model of the fused path; see `PagedModel`. Takes the weights out of `weights`."""

    def __init__(
        self,
        weights: FusedWeights,
        attention: Attention,
        context_tokens: int,
        quantization: str = "none",
    ) -> None:
        super().__init__(attention, context_tokens, int(weights.config["vocab_size"]))
        self._shape = attention.cache.shapes[0]
        self._scaling = self._shape.key_size**-0.5
        self._embedding = weights.tensors.pop("model.embed_tokens.weight")
        self._inv_freq, self._rotary_scale = weights.inv_freq, weights.attention_scaling
        self._head = make_linear(weights.tensors.pop("lm_head.weight", self._embedding))
        layers = range(len(weights.shapes))
        self._layers = [FusedLayer(weights, index, quantization) for index in layers]
        epsilon = weights.config["rms_norm_eps"]
        self._norm = RmsNorm(weights.tensors.pop("model.norm.weight"), epsilon)
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
        tokens, positions = self._resolve_tokens(inputs.tokens), inputs.positions
        count = len(tokens)
        if count == 1 and isinstance(self._head, PackedLinear):
            # Such layers compute a single row twice (see linear.py); doubling it once is cheaper.
            tokens, positions = tokens.expand(2), positions.expand(2)
        hidden = functional.embedding(tokens, self._embedding)
        rotate = RotaryEmbedding(self._inv_freq, self._rotary_scale, hidden, positions)
        for layer in self._layers:
            hidden = self._attended(layer, hidden, rotate, count)
            hidden = self._transformed(layer, hidden)
        hidden_rows = self._norm(hidden.index_select(0, inputs.logits_indices))
        logits: Tensor = self._head(hidden_rows)
        return logits.float()

    def _attended(
        self, layer: FusedLayer, hidden: Tensor, rotate: RotaryEmbedding, count: int
    ) -> Tensor:
        shape = self._shape
        qkv = layer.qkv(layer.input_norm(hidden)).view(len(hidden), -1, shape.key_size)
        rotated = shape.heads + shape.kv_heads
        if layer.has_head_norms:
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
            scaling=self._scaling,
        )
        flat = answers.reshape(count, -1).expand(len(hidden), -1)
        return layer.out.add(flat, hidden)

    def _transformed(self, layer: FusedLayer, hidden: Tensor) -> Tensor:
        gate, up = layer.gate_up.halves(layer.mlp_norm(hidden))
        return layer.down.add(functional.silu(gate).mul_(up), hidden)
