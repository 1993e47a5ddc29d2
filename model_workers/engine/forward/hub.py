"""Any decoder-only model of transformers over the paged cache, through transformers' attention interface.

Some decoders run over the paged cache and compute something else: DiffLlama attends twice per layer, BART's decoder
counts positions by itself. Only their numbers show it. So two prompts are computed in one step and decoded token by
token before a model is served; then transformers computes both, with their answers, in one pass (`_compare`). This is
left out with `quantization` or `tensor_parallel`.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from typing_extensions import override

from model_workers.engine.blocks import CPU_BLOCK_TOKENS
from model_workers.engine.devices import TOLERANCES
from model_workers.engine.forward.attention import (
    Attention,
    CachedModel,
    ModelInputs,
    PagedAttention,
)
from model_workers.engine.forward.fused_folder import is_fused
from model_workers.engine.forward.kv_cache import KvCache, LayerShape
from model_workers.engine.forward.linear import make_linear
from model_workers.engine.forward.tensor_parallel import check_ranks
from model_workers.engine.paged_model import PagedModel, SequenceChunk
from model_workers.engine.weights import read_whole
from model_workers.model_folder import check_supported
from sluice.settings import SettingsError
from sluice.settings.models import GENERATE

logger = logging.getLogger(__name__)

ATTENTION: Final = "sluice_paged"
"""Name of our function in transformers' registry. It has no mask function, so that models make no mask."""
LAYERS_WITH_KEYS: Final = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers whose state is keys and values."""


ROWS: Final = 2
"""Number of prompts."""
TOKENS: Final = 4
"""Number of tokens of each answer that are compared: the one after the prompt, and some that are decoded."""
PROMPT_TOKENS: Final = 12
"""Maximum length of the prompts."""


def read_config(path: str) -> Any:
    """Return the configuration of a model that can be served.

    Raises:
        SettingsError: There is none, or it cannot be served.
    """
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(f"{path}: {str(error).splitlines()[0]}") from error
    if config.is_encoder_decoder:
        raise SettingsError(
            f"{path}: is an encoder-decoder model; name a decoder-only one, or {GENERATE}"
        )
    unsupported = set(getattr(config, "layer_types", None) or ()) - LAYERS_WITH_KEYS
    if unsupported:
        kinds = ", ".join(sorted(unsupported))
        raise SettingsError(f"{path}: layers of kind {kinds} cannot be served here; {GENERATE}")
    check_supported(path, config.to_dict())
    if _is_fp8(config):
        # Blocks of weights with a scale each: transformers has their kernels from the hub alone.
        config.quantization_config["dequantize"] = True
    return config


def _is_fp8(config: Any) -> bool:
    """Return whether a checkpoint holds 8-bit weights; `check_supported` has refused all other quantized ones."""
    return bool(getattr(config, "quantization_config", None))


def read_weights(
    path: str,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str,
    context_tokens: int,
    ranks: int = 1,
) -> tuple[Any, tuple[LayerShape, ...]]:
    """Read the model of transformers, with our attention function and linear layers, and the shapes of its cache.

    Raises:
        SettingsError: The model does not use transformers' attention interface, is computed differently with ours, or
            its weights are incomplete.
        ValueError, OSError: It cannot be read.
    """
    try:
        model = read_whole(
            AutoModelForCausalLM,
            path,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            **_placed(path, config, device, ranks),
        )
    except KeyError as error:
        raise SettingsError(
            f"{path}: a {config.model_type} has attention of its own; {GENERATE}"
        ) from error
    except ImportError as error:
        raise SettingsError(f"{path}: {str(error).splitlines()[0]}") from error
    model = model.to(device).eval()
    if dtype is torch.float32 and _is_fp8(config):
        model = model.float()  # was made wide to bfloat16, whatever was asked for
    shapes = tuple(layer_shapes(model))
    if ranks == 1 and quantization == "none":
        _compare(path, model, shapes, context_tokens)
    else:
        cause = "tensor_parallel" if ranks > 1 else "quantization"
        logger.info(
            "did not compare the first tokens of %s with transformers: %s is set", path, cause
        )
    # The layers of a rank sum over all ranks, and stay as they are.
    if ranks == 1 and not is_fused(model):
        replace_linear_layers(model, quantization)
    return model, shapes


def _placed(path: str, config: Any, device: torch.device, ranks: int) -> dict[str, Any]:
    """Return options for where the weights go; those for a GPU need not pass through host memory."""
    if ranks > 1:
        check_ranks(path, config, ranks)
        from transformers.distributed.configuration_utils import (  # not in transformers 5.0
            DistributedConfig,
        )

        return {"distributed_config": DistributedConfig(tp_size=ranks)}
    return {"device_map": {"": device}} if device.type == "cuda" else {}


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call of attention; tensors as in `Attention.attend`."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    softcap: float | None
    window: int | None


_attend: ContextVar[Callable[[AttentionCall], Tensor]] = ContextVar("attend")


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
    """Compute attention of one layer for transformers, with [1, heads, tokens, size]."""
    more = {name for name, thing in others.items() if isinstance(thing, Tensor)} - {"position_ids"}
    if attention_mask is not None or more:
        raise SettingsError(
            f"{type(module).__name__}: attention takes more than keys and values; {GENERATE}"
        )
    if not (others.get("is_causal") or getattr(module, "is_causal", True)):
        raise SettingsError(f"{type(module).__name__}: attention looks ahead; {GENERATE}")
    call = AttentionCall(
        layer=module.layer_idx,
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        window=sliding_window,
    )
    return _attend.get()(call)[None], None


AttentionInterface.register(ATTENTION, attention_function)


def run(model: Any, attend: Callable[[AttentionCall], Tensor], inputs: ModelInputs) -> Tensor:
    """Return the logits [wanted, vocabulary] of packed tokens; `attend` computes each layer's attention."""
    token = _attend.set(attend)
    try:
        output = model(
            input_ids=inputs.tokens[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            logits_to_keep=inputs.logits_indices,
        )
    finally:
        _attend.reset(token)
    logits: Tensor = output.logits
    return logits[0]


def layer_shapes(model: Any) -> list[LayerShape]:
    """Return the shape of each layer's cache, found by running the model on one token.

    Raises:
        SettingsError: Not every layer attends through the interface.
    """
    shapes: dict[int, LayerShape] = {}

    def record(call: AttentionCall) -> Tensor:
        heads, kv_heads = call.query.shape[1], call.key.shape[1]
        sizes = call.key.shape[2], call.value.shape[2]
        shapes[call.layer] = LayerShape(heads, kv_heads, *sizes, call.window, call.softcap)
        return call.value.repeat_interleave(heads // kv_heads, 1)  # a token that sees only itself

    zero = torch.zeros(1, dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            run(model, record, ModelInputs(zero, zero, zero))
    except SettingsError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # Raised by models with attention code of their own that needs a mask.
        raise SettingsError(
            f"{type(model).__name__}: does not run without a mask; {GENERATE}"
        ) from error
    if sorted(shapes) != list(range(model.config.num_hidden_layers)):
        raise SettingsError(
            f"{type(model).__name__}: not every layer keeps keys and values; {GENERATE}"
        )
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(shapes)
    for layer, kind in enumerate(kinds):
        if kind == "sliding_attention" and shapes[layer].window is None:
            raise SettingsError(
                f"{type(model).__name__}: layer {layer} does not tell its window; {GENERATE}"
            )
    return [shapes[layer] for layer in sorted(shapes)]


@torch.inference_mode()
def _compare(path: str, model: Any, shapes: Sequence[LayerShape], context_tokens: int) -> None:
    """Compare the first tokens of two answers over the paged cache with transformers' own.

    Raises:
        SettingsError: Their logits differ.
    """
    dtype, device = model.dtype, model.device
    tokens = max(2, min(TOKENS, context_tokens // 2))
    blocks = ROWS * -(-(PROMPT_TOKENS + TOKENS) // CPU_BLOCK_TOKENS)
    cache = KvCache(shapes, blocks, CPU_BLOCK_TOKENS, dtype, device)
    paged = HubModel(model, PagedAttention(cache), context_tokens)
    length = min(PROMPT_TOKENS, context_tokens // 2)
    rows = [
        [(7 * place + 3 + 11 * row) % paged.vocab_size for place in range(length)]
        for row in range(ROWS)
    ]
    ours = torch.stack(list(_decoded(paged, rows, tokens)), 1)
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor(rows, device=device)[:, :-1]
        theirs = model(input_ids=ids, use_cache=False).logits[:, length - 1 :].float()
    finally:
        model.set_attn_implementation(ATTENTION)
    size = theirs.amax(-1) - theirs.amin(-1)
    agrees = (ours - theirs).abs().amax(-1) <= TOLERANCES[dtype] * size
    wrong = ~agrees.all(0)
    if wrong.any():
        raise SettingsError(
            f"{path}: the paged engine computes it otherwise than transformers, from token {int(wrong.nonzero()[0])} "
            f"of a trial on; {GENERATE}"
        )


def _decoded(paged: PagedModel, rows: list[list[int]], tokens: int) -> Iterator[Tensor]:
    """Decode greedily; yield the logits of each step, [rows, vocabulary], and append the tokens to `rows`."""
    blocks = paged.num_blocks // len(rows)
    tables = [range(row * blocks, (row + 1) * blocks) for row in range(len(rows))]
    pending: Sequence[Sequence[int]] = [list(row) for row in rows]
    for _ in range(tokens):
        chunks = [
            SequenceChunk(new, len(row) - len(new), table, 1)
            for new, row, table in zip(pending, rows, tables, strict=True)
        ]
        logits = paged.forward(chunks).clone()
        yield logits
        pending = logits.argmax(-1)[:, None].tolist()
        for row, new in zip(rows, pending, strict=True):
            row.extend(new)


def replace_linear_layers(model: Any, quantization: str, *, decodes: bool = True) -> None:
    """Replace a model's linear layers by ours (`make_linear`), in place. The output layer is never quantized."""
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (nn.Linear, Conv1D):
                weight = child.weight.T if type(child) is Conv1D else child.weight
                kind = "none" if child is head else quantization
                setattr(parent, name, make_linear(weight, child.bias, kind, decodes=decodes))


class HubModel(CachedModel):
    """A model of transformers over the paged cache; see `PagedModel`. `model` was loaded with `ATTENTION`."""

    def __init__(self, model: Any, attention: Attention, context_tokens: int) -> None:
        super().__init__(attention, context_tokens, int(model.config.vocab_size))
        self._model = model

    @torch.inference_mode()
    @override
    def forward(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        inputs = self._attention.begin(chunks)
        inputs = replace(inputs, tokens=self._resolve_tokens(inputs.tokens))
        return run(self._model, self._attend, inputs).float()

    def _attend(self, call: AttentionCall) -> Tensor:
        return self._attention.attend(
            call.layer, call.query, call.key, call.value, scaling=call.scaling
        )
