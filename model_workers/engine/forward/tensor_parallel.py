"""One model on several devices: each rank has a part of every layer (transformers' tensor-parallel plan).

All ranks must make the same calls in the same order, because each layer ends in a sum over the ranks. The engine drives
rank 0, which sends every call to the others first.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from typing_extensions import override

from model_workers.engine.paged_model import PagedModel, SequenceChunk
from sluice.settings import SettingsError


class Followers(Protocol):
    """The ranks other than rank 0."""

    def send(self, call: str, *arguments: Any) -> None:
        """Send a call of `PagedModel` to the ranks, or the call that creates the model ("paged")."""

    def lost(self) -> None:
        """Give up the worker after a failed call of rank 0: the ranks are no longer in the same call."""


class LeadRank(PagedModel):
    """A model whose rank 0 is here; see `PagedModel`. A fault of one rank ends the worker."""

    def __init__(self, model: PagedModel, followers: Followers) -> None:
        self.block_tokens = model.block_tokens
        self.num_blocks = model.num_blocks
        self.context_tokens = model.context_tokens
        self.vocab_size = model.vocab_size
        self._model = model
        self._followers = followers

    @override
    def forward(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        try:
            self._followers.send("forward", chunks)
            return self._model.forward(chunks)
        except Exception:
            self._followers.lost()
            raise

    def feed(self, drawn: Tensor) -> None:
        """Keep drawn tokens, for which this waits: the other ranks get them from the host. See `PagedModel.feed`."""
        self._followers.send("feed", drawn.cpu())
        self._model.feed(drawn)

    @override
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._followers.send("copy_blocks", pairs)
        self._model.copy_blocks(pairs)

    @override
    def clear_blocks(self, blocks: Sequence[int]) -> None:
        self._followers.send("clear_blocks", blocks)
        self._model.clear_blocks(blocks)


def check_ranks(path: str, config: Any, ranks: int) -> None:
    """Raise an error for a model that `ranks` cannot share.

    Raises:
        SettingsError: It has no plan, or its heads do not divide.
    """
    if not getattr(config, "base_model_tp_plan", None):
        raise SettingsError(
            f"{path}: tensor_parallel: transformers has no plan for a {config.model_type}"
        )
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % ranks or kv_heads % ranks:
        raise SettingsError(
            f"{path}: tensor_parallel: {ranks} ranks cannot share {heads} heads with {kv_heads} key-value heads evenly"
        )
