"""Allocation of the blocks of a KV cache: reference counts, and prefix caching by shared blocks.

The cache is cut into blocks of ``block_tokens`` positions; a row's table says which block holds which positions. A full
block is known by the hash of its tokens chained to the hash of the block before it, so that equal hashes mean equal
tokens from the row's first on: a row that begins like an earlier one shares its blocks (prefix cache).

Rules:
1. A block is free (no content), held (by as many rows as it has references), or idle: no row holds it, but it is known
   by its hash and can be shared again. Idle blocks are reused when no free one is left, the least recently used first;
   of one row the last block first, because a block is of no use without those before it.
2. Free blocks are allocated lowest number first, which keeps the used part of the cache compact.
3. The content of a block that is known by its hash never changes. A row that must write into one gets a copy.
"""

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

_DIGEST_BYTES: Final = 16

CPU_BLOCK_TOKENS: Final = 32
"""Size of a block on a CPU; docs/decisions/paged-attention-cpu.md has the figures."""


class BlockTable:
    """The blocks of one row.

    Attributes:
        blocks: in the order of the row's positions.
        hashes: of the row's full blocks, as far as they were needed.
        known: leading blocks that are known by their hash, or are copies of known ones.
    """

    __slots__ = ("blocks", "hashes", "known")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.hashes: list[bytes] = []
        self.known = 0


class BlockManager:
    """The blocks of one cache."""

    def __init__(self, num_blocks: int, block_tokens: int, *, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.prefix_cache = prefix_cache
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that no row holds."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens need."""
        return -(-tokens // self.block_tokens)

    def missing(self, table: BlockTable, tokens: Sequence[int]) -> bytes | None:
        """The hash of the first full block of ``tokens`` that is not known; None when all are."""
        self._hash(table, tokens, len(tokens))
        found = self._found(table)
        return table.hashes[found] if found < len(table.hashes) else None

    def open(
        self, table: BlockTable, tokens: Sequence[int], reserve: int = 0
    ) -> list[tuple[int, int]] | None:
        """Fills an empty table with blocks for ``tokens``, shared ones as far as possible.

        At least the last token is left to compute: without it there are no logits.

        Args:
            reserve: blocks that must stay free.

        Returns:
            Blocks to copy before anything is computed, (from, to). Without enough blocks None, and nothing has changed.
        """
        assert not table.blocks
        self._hash(table, tokens, len(tokens))
        found = self._found(table)
        wanted = self.blocks_for(len(tokens))
        whole = found * self.block_tokens == len(tokens)
        if whole and not self._affords(table, found, wanted + 1 - found, reserve):
            found, whole = found - 1, False
        if not self._affords(table, found, wanted + whole - found, reserve):
            return None
        for digest in table.hashes[:found]:
            table.blocks.append(self._held(self._block_of[digest]))
        table.known = found
        copies = [self._own_last(table)] if whole else []
        self.grow(table, len(tokens))
        return copies

    def cached_tokens(self, table: BlockTable, tokens: int) -> int:
        """Of ``tokens`` in a table just opened, how many need not be computed."""
        return min(table.known * self.block_tokens, tokens - 1)

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Appends blocks until ``tokens`` fit; False, and nothing has changed, without enough blocks."""
        missing = self.blocks_for(tokens) - len(table.blocks)
        if missing > self.free_blocks:
            return False
        for _ in range(missing):
            table.blocks.append(self._fresh())
        return True

    def computed(self, table: BlockTable, tokens: Sequence[int], count: int) -> None:
        """The first ``count`` of ``tokens`` are in the cache: blocks that are full now become known."""
        full = count // self.block_tokens
        if full <= table.known or not self.prefix_cache:
            return
        self._hash(table, tokens, count)
        for place in range(table.known, full):
            digest, block = table.hashes[place], table.blocks[place]
            if digest not in self._block_of:
                self._block_of[digest] = block
                self._hash_of[block] = digest
        table.known = full

    def close(self, table: BlockTable) -> list[int]:
        """Empties a table; returns the blocks that are free now."""
        freed = [block for block in reversed(table.blocks) if self._dropped(block)]
        table.blocks = []
        table.known = 0
        return freed

    def discard(self, table: BlockTable) -> list[int]:
        """As `close`, of a row whose cache content is not to be trusted: none of its blocks stays known."""
        for block in table.blocks:
            self._forget(block)
        return self.close(table)

    def _hash(self, table: BlockTable, tokens: Sequence[int], count: int) -> None:
        if not self.prefix_cache:
            return
        size, hashes = self.block_tokens, table.hashes
        for place in range(len(hashes), count // size):
            before = hashes[-1] if hashes else b""
            content = array("I", tokens[place * size : (place + 1) * size]).tobytes()
            hashes.append(hashlib.blake2b(before + content, digest_size=_DIGEST_BYTES).digest())

    def _found(self, table: BlockTable) -> int:
        """Leading blocks of the table's hashes that are known."""
        for place, digest in enumerate(table.hashes):
            if digest not in self._block_of:
                return place
        return len(table.hashes)

    def _affords(self, table: BlockTable, found: int, fresh: int, reserve: int) -> bool:
        """Whether ``fresh`` blocks are there beside the ``found`` known ones, which may be idle themselves."""
        known = (self._block_of[digest] for digest in table.hashes[:found])
        idle = sum(self._references[block] == 0 for block in known)
        return self.free_blocks - idle >= fresh + reserve

    def _held(self, block: int) -> int:
        self._references[block] += 1
        self._idle.pop(block, None)
        return block

    def _fresh(self) -> int:
        if self._free:
            return self._held(heapq.heappop(self._free))
        block, _ = self._idle.popitem(last=False)
        self._forget(block)
        return self._held(block)

    def _own_last(self, table: BlockTable) -> tuple[int, int]:
        """Copy on write: the last block becomes the row's own."""
        shared = table.blocks[-1]
        own = self._fresh()
        table.blocks[-1] = own
        self._dropped(shared)
        return shared, own

    def _dropped(self, block: int) -> bool:
        """Takes one reference away; whether the block is free now."""
        self._references[block] -= 1
        assert self._references[block] >= 0, f"block {block} was given back twice"
        if self._references[block]:
            return False
        if block in self._hash_of:
            self._idle[block] = None
            return False
        heapq.heappush(self._free, block)
        return True

    def _forget(self, block: int) -> None:
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
