import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_workers.engine.slot_cache import GROW_TOKENS, SlotCache

HEADS, SIZE = 2, 3


def states(rows: int, tokens: int, value: float) -> torch.Tensor:
    return torch.full((rows, HEADS, tokens, SIZE), value)


def prefill(cache: SlotCache, first: int, rows: int, tokens: int, value: float) -> torch.Tensor:
    cache.aim(first, rows, 0, tokens)
    keys, _ = cache.update(states(rows, tokens, value), states(rows, tokens, -value), 0)
    return keys


def read(cache: SlotCache, slot: int, length: int) -> list[float]:
    layer = cache._slot_layers[0]
    assert layer.keys is not None
    return [float(value) for value in layer.keys[slot, 0, :length, 0]]


def test_rows_decode_at_their_own_positions() -> None:
    cache = SlotCache(4, 512)
    prefill(cache, 0, 1, 3, 1.0)
    prefill(cache, 1, 1, 1, 2.0)
    cache.aim(0, 2, torch.tensor([3, 1]), 4)
    keys, values = cache.update(states(2, 1, 9.0), states(2, 1, -9.0), 0)
    assert keys[:, 0, :, 0].tolist() == [[1, 1, 1, 9], [2, 9, 0, 0]]
    assert torch.equal(values, -keys)


def test_a_prompt_in_pieces_is_the_prompt() -> None:
    cache = SlotCache(2, 512)
    prefill(cache, 0, 1, 2, 1.0)
    cache.aim(0, 1, 2, 5)
    keys, _ = cache.update(states(1, 3, 4.0), states(1, 3, 4.0), 0)
    assert keys[0, 0, :, 0].tolist() == [1, 1, 4, 4, 4]


def test_memory_grows_in_steps_up_to_the_limits_and_comes_back() -> None:
    cache = SlotCache(slots=3, context_tokens=200)
    assert cache.size_bytes() == 0
    row_bytes = 2 * HEADS * SIZE * 4
    prefill(cache, 0, 1, 5, 1.0)
    assert cache.size_bytes() == GROW_TOKENS * row_bytes
    prefill(cache, 1, 2, 150, 2.0)
    assert cache.size_bytes() == 3 * 200 * row_bytes
    assert read(cache, 0, 6) == [1, 1, 1, 1, 1, 0]
    cache.release()
    assert cache.size_bytes() == 0
    assert prefill(cache, 0, 1, 2, 3.0)[0, 0, :, 0].tolist() == [3, 3]


def test_scrub_leaves_nothing_behind() -> None:
    cache = SlotCache(2, 64)
    prefill(cache, 0, 2, 4, torch.nan)
    cache.scrub(0)
    assert read(cache, 0, 64) == [0] * 64


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 7)), min_size=1, max_size=12))
def test_moves_keep_what_rows_wrote(steps: list[tuple[int, int]]) -> None:
    """Rows join behind the others, leave anywhere, and the last one fills the hole."""
    cache = SlotCache(16, 512)
    rows: list[tuple[float, int]] = []
    for value, (length, leaver) in enumerate(steps, start=1):
        prefill(cache, len(rows), 1, length, float(value))
        rows.append((float(value), length))
        if leaver < len(rows):
            last = rows.pop()
            if leaver < len(rows):
                cache.move(len(rows), leaver, last[1])
                rows[leaver] = last
    for slot, (wrote, length) in enumerate(rows):
        assert read(cache, slot, length) == [wrote] * length
