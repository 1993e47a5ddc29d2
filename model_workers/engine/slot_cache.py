"""Keys and values of all rows in slots, as a cache of transformers.

Per layer one tensor [slots, heads, tokens, head size] for keys and one for values. A forward pass works on a range of
neighbouring slots, its `Window`, so the attention reads views and nothing is gathered. Whoever uses the cache keeps the
rows that decode together in the first slots (`SlotCache.move` fills holes).

The tensors grow in steps, in slots and in tokens, and `SlotCache.release` gives them back when nobody needs them. What
a row leaves in its slot stays there: a mask hides it. It must be finite, though, because a masked NaN is still NaN;
`SlotCache.scrub` cleans up behind a row whose numbers broke.
"""

from typing import Any, Final

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GROW_TOKENS: Final = 128
"""Lengths grow in multiples of this."""


class Window:
    """Which slots and positions the next forward pass works on.

    Attributes:
        first: the first slot.
        positions: of the new tokens: one offset for all rows, or an index per row (one new token each).
        length: tokens that the attention sees, the new ones included.
        slots, tokens: room that the tensors must have.
    """

    def __init__(self) -> None:
        self.first = 0
        self.positions: int | Tensor = 0
        self.length = 0
        self.slots = 0
        self.tokens = 0


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values."""

    is_sliding = False

    def __init__(self, window: Window) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: `update` makes the tensors."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes the new tokens, and returns views of all that the attention sees."""
        self.keys = self._fitted(self.keys, key_states)
        self.values = self._fitted(self.values, value_states)
        self.is_initialized = True
        return self._written(self.keys, key_states), self._written(self.values, value_states)

    def get_seq_length(self) -> int:
        """Tokens before the new ones; rows differ, so models must be given position_ids."""
        return self._window.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what `update` returns."""
        return self._window.length, 0

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first ``length`` tokens of a slot."""
        for tensor in self._tensors():
            tensor[target, :, :length] = tensor[source, :, :length]

    def scrub(self, slot: int) -> None:
        """Zeroes a slot."""
        for tensor in self._tensors():
            tensor[slot].zero_()

    def release(self) -> None:
        """Gives the memory back."""
        self.keys = self.values = None
        self.is_initialized = False

    def size_bytes(self) -> int:
        """Memory in use, bytes."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def _tensors(self) -> tuple[Tensor, ...]:
        if self.keys is None or self.values is None:
            return ()
        return self.keys, self.values

    def _fitted(self, tensor: Tensor | None, states: Tensor) -> Tensor:
        window = self._window
        slots, _, tokens, _ = (0, 0, 0, 0) if tensor is None else tensor.shape
        if tensor is not None and slots >= window.slots and tokens >= window.tokens:
            return tensor
        grown = states.new_zeros(window.slots, states.shape[1], window.tokens, states.shape[3])
        if tensor is not None:
            grown[:slots, :, :tokens] = tensor
        return grown

    def _written(self, tensor: Tensor, states: Tensor) -> Tensor:
        window = self._window
        rows = tensor[window.first : window.first + states.shape[0]]
        if isinstance(window.positions, int):
            rows[:, :, window.positions : window.length] = states
        else:
            rows[torch.arange(states.shape[0], device=states.device), :, window.positions] = (
                states.squeeze(2)
            )
        return rows[:, :, : window.length]


class SlotCache(Cache):
    """All layers, in the slots of one engine."""

    def __init__(self, slots: int, context_tokens: int) -> None:
        self._window = Window()
        self._slot_layers: list[SlotLayer] = []
        # Called once per layer of the model, as it first writes; the annotation wants a class, a function does.
        super().__init__(layer_class_to_replicate=self._add_layer)  # type: ignore[arg-type]
        self._slots_max = slots
        self._tokens_max = context_tokens

    def aim(self, first: int, rows: int, positions: int | Tensor, length: int) -> None:
        """Sets the `Window` of the next forward pass, and room for it."""
        window = self._window
        window.first, window.positions, window.length = first, positions, length
        if first + rows > window.slots:
            window.slots = min(max(first + rows, 2 * window.slots), self._slots_max)
        if length > window.tokens:
            wanted = max(length, window.tokens * 5 // 4)
            steps = -(-wanted // GROW_TOKENS)
            window.tokens = min(steps * GROW_TOKENS, self._tokens_max)

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first ``length`` tokens of slot ``source`` over slot ``target``."""
        for layer in self._slot_layers:
            layer.move(source, target, length)

    def scrub(self, slot: int) -> None:
        """Zeroes a slot whose row left numbers that are not finite."""
        for layer in self._slot_layers:
            layer.scrub(slot)

    def release(self) -> None:
        """Gives all memory back; no slot is in use any more."""
        self._window.slots = self._window.tokens = 0
        for layer in self._slot_layers:
            layer.release()

    def size_bytes(self) -> int:
        """Memory in use, bytes."""
        return sum(layer.size_bytes() for layer in self._slot_layers)

    def _add_layer(self) -> SlotLayer:
        layer = SlotLayer(self._window)
        self._slot_layers.append(layer)
        return layer
