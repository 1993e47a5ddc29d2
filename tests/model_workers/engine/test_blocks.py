from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from model_workers.engine.blocks import BlockManager, BlockTable

SIZE = 2
TOTAL = 12


def opened(blocks: BlockManager, tokens: list[int], reserve: int = 0) -> BlockTable:
    table = BlockTable()
    assert blocks.open(table, tokens, reserve) is not None
    return table


def filled(blocks: BlockManager, tokens: list[int]) -> BlockTable:
    table = opened(blocks, tokens)
    blocks.computed(table, tokens, len(tokens))
    return table


def test_free_blocks_are_given_out_lowest_number_first() -> None:
    blocks = BlockManager(TOTAL, SIZE)
    first, second = opened(blocks, [1, 2, 3]), opened(blocks, [4, 5])
    assert (first.blocks, second.blocks) == ([0, 1], [2])
    blocks.close(first)
    assert opened(blocks, [6]).blocks == [0]


def test_prefix_blocks_are_shared_after_their_owner_left() -> None:
    blocks = BlockManager(TOTAL, SIZE)
    first = filled(blocks, [1, 2, 3, 4, 5])
    second = opened(blocks, [1, 2, 3, 4, 9])
    assert second.blocks[:2] == first.blocks[:2]
    assert blocks.cached_tokens(second, 5) == 4
    assert blocks.free_blocks == TOTAL - 4
    blocks.close(first)
    blocks.close(second)
    assert blocks.free_blocks == TOTAL
    assert blocks.cached_tokens(opened(blocks, [1, 2, 3, 4, 9]), 5) == 4


def test_a_wholly_known_row_gets_a_copy_of_its_last_block() -> None:
    blocks = BlockManager(TOTAL, SIZE)
    first = filled(blocks, [1, 2, 3, 4])
    table = BlockTable()
    assert blocks.open(table, [1, 2, 3, 4]) == [(first.blocks[1], 2)]
    assert table.blocks == [first.blocks[0], 2]
    assert blocks.cached_tokens(table, 4) == 3


def test_last_block_is_recomputed_without_a_block_to_copy() -> None:
    blocks = BlockManager(2, SIZE)
    blocks.close(filled(blocks, [1, 2, 3, 4]))
    table = BlockTable()
    assert blocks.open(table, [1, 2, 3, 4]) == []
    assert blocks.cached_tokens(table, 4) == 2


def test_eviction_is_lru_and_last_block_of_a_sequence_first() -> None:
    blocks = BlockManager(4, SIZE)
    old, new = filled(blocks, [1, 2, 3, 4]), filled(blocks, [5, 6, 7, 8])
    blocks.close(old)
    blocks.close(new)
    blocks.close(opened(blocks, [0]))
    assert [blocks.missing(BlockTable(), [1, 2, 3, 4]) is None] == [False]
    assert blocks.cached_tokens(opened(blocks, [1, 2, 9]), 3) == 2
    assert blocks.missing(BlockTable(), [5, 6, 7, 8]) is None


def test_tenants_share_nothing() -> None:
    blocks = BlockManager(TOTAL, SIZE)
    found = {}
    for sequence in ("acme", "other", "acme "):
        table = BlockTable(sequence.strip())
        assert blocks.open(table, [1, 2, 3]) is not None
        found[sequence] = blocks.cached_tokens(table, 3), table.blocks[0]
        blocks.computed(table, [1, 2, 3], 3)
    assert found == {"acme": (0, 0), "other": (0, 2), "acme ": (2, 0)}


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    blocks = BlockManager(TOTAL, SIZE, prefix_cache="off")
    first = filled(blocks, [1, 2, 3])
    second = opened(blocks, [1, 2, 3])
    assert not set(first.blocks) & set(second.blocks)
    assert blocks.close(first) == [1, 0]


@pytest.fixture
def half_blocks() -> BlockManager:
    """Blocks of four tokens in two units."""
    return BlockManager(TOTAL, 4, share_tokens=2)


def test_prefixes_of_64_tokens_are_shared_in_blocks_of_256() -> None:
    blocks = BlockManager(TOTAL, 256)
    first = filled(blocks, list(range(70)))
    table = BlockTable()
    tokens = [*range(64), *range(500, 600)]
    assert blocks.open(table, tokens) == [(first.blocks[0], 1)]
    assert blocks.cached_tokens(table, len(tokens)) == 64


def test_the_beginning_of_a_block_is_copied(half_blocks: BlockManager) -> None:
    blocks = half_blocks
    first = filled(blocks, [1, 2, 3, 4, 5, 6, 7])
    table = BlockTable()
    assert blocks.open(table, [1, 2, 3, 4, 5, 6, 9, 9]) == [(first.blocks[1], 2)]
    assert table.blocks == [first.blocks[0], 2]
    assert blocks.cached_tokens(table, 8) == 6
    blocks.computed(table, [1, 2, 3, 4, 5, 6, 9, 9], 8)
    assert blocks.missing(BlockTable(), [1, 2, 3, 4, 5, 6, 9, 9]) is None


def test_a_copied_beginning_needs_no_block_that_is_not_there(half_blocks: BlockManager) -> None:
    blocks = half_blocks
    held = opened(blocks, [0] * 4 * (TOTAL - 1))
    blocks.close(filled(blocks, [1, 2, 3]))
    table = BlockTable()
    assert blocks.open(table, [1, 2, 9]) == [], "the idle block itself is reused, with its content"
    assert blocks.cached_tokens(table, 3) == 2
    assert not set(table.blocks) & set(held.blocks)


class AnyOrder(RuleBasedStateMachine):
    """Sequences open, write, grow and close in any order, beside a model of what stands in every block."""

    size = SIZE
    share = SIZE

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(TOTAL, self.size, share_tokens=self.share)
        assert self.blocks.share_tokens == self.share
        self.sequences: list[tuple[BlockTable, list[int], int]] = []
        self.content: dict[int, list[tuple[int, ...] | None]] = {}

    def write(self, table: BlockTable, tokens: list[int], start: int, end: int) -> None:
        """What a step does: writes positions, each holding the whole prefix as keys and values do."""
        for position in range(start, end):
            block = table.blocks[position // self.size]
            holders = Counter(b for other, _, _ in self.sequences for b in other.blocks)
            assert holders[block] <= 1, "a shared block is written"
            cells = self.content.setdefault(block, [None] * self.size)
            cells[position % self.size] = tuple(tokens[: position + 1])
        self.blocks.computed(table, tokens, end)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        reserve=st.integers(0, 2),
        part=st.integers(0, 9),
    )
    def open(self, tokens: list[int], reserve: int, part: int) -> None:
        table, before = BlockTable(), self.blocks.free_blocks
        copies = self.blocks.open(table, tokens, reserve)
        if copies is None:
            assert (table.blocks, self.blocks.free_blocks) == ([], before)
            return
        assert self.blocks.free_blocks >= reserve
        for source, target in copies:
            self.content[target] = list(self.content[source])
        cached = self.blocks.cached_tokens(table, len(tokens))
        assert cached < len(tokens)
        self.sequences.append((table, tokens, 0))
        self.step(len(self.sequences) - 1, cached, part)

    def step(self, place: int, start: int, part: int) -> None:
        table, tokens, _ = self.sequences[place]
        end = min(len(tokens), start + part)
        self.write(table, tokens, start, end)
        self.sequences[place] = (table, tokens, end)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), part=st.integers(1, 9))
    def go_on(self, data: st.DataObject, part: int) -> None:
        place = data.draw(st.integers(0, len(self.sequences) - 1))
        self.step(place, self.sequences[place][2], part)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), token=st.integers(0, 1))
    def decode(self, data: st.DataObject, token: int) -> None:
        place = data.draw(st.integers(0, len(self.sequences) - 1))
        table, tokens, computed = self.sequences[place]
        if self.blocks.grow(table, len(tokens) + 1):
            tokens.append(token)
            self.step(place, computed, len(tokens))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), broken=st.booleans())
    def leave(self, data: st.DataObject, broken: bool) -> None:
        table, *_ = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        held = {block for other, _, _ in self.sequences for block in other.blocks}
        mine = set(table.blocks)
        freed = self.blocks.discard(table) if broken else self.blocks.close(table)
        assert not set(freed) & held
        assert set(freed) <= mine
        if broken:
            assert set(freed) == mine - held

    @invariant()
    def every_row_reads_its_own_tokens(self) -> None:
        for table, tokens, computed in self.sequences:
            for position in range(computed):
                cell = self.content[table.blocks[position // self.size]][position % self.size]
                assert cell == tuple(tokens[: position + 1])

    @invariant()
    def no_block_is_lost(self) -> None:
        held = {block for table, _, _ in self.sequences for block in table.blocks}
        assert self.blocks.free_blocks == TOTAL - len(held)


class AnyOrderOfUnits(AnyOrder):
    """The same with blocks of two units."""

    size = 4
    share = 2


TestAnyOrder = AnyOrder.TestCase
TestAnyOrderOfUnits = AnyOrderOfUnits.TestCase
TestAnyOrder.settings = TestAnyOrderOfUnits.settings = settings(stateful_step_count=40)
