"""Allocation of KV cache blocks: reference counts, and prefix caching by shared blocks.

The cache is divided into blocks of `block_tokens` positions; the table of a sequence maps its positions to blocks. A
sequence that begins like an earlier one shares its blocks (prefix cache). Tokens are compared in units of
`share_tokens`: the hash of a full unit includes the hash of the unit before it, and the first one a salt, so that equal
hashes mean equal tokens from the start, under one salt. The salt is the tenant if the cache is per tenant.

A unit is a block, or a part of a block if a kernel needs large blocks. Then whole blocks are shared, and a sequence
gets a copy of a block of which only the first units are equal.

Rules:
1. A block is free (no content), held (by as many sequences as it has references) or idle: no sequence holds it, but its
   units can be found by hash and shared again. Idle blocks are evicted when no free one is left, the least recently
   used first; of one sequence the last block first, because a block is useless without those before it.
2. Free blocks are allocated lowest number first, which keeps the used part of the cache compact.
3. The content of a unit that can be found by hash never changes. A sequence that must write into one gets a copy.
4. If a unit can be found, so can the units before it in the same block.
"""

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from sluice.settings.models import PrefixCache

_DIGEST_BYTES: Final = 16
"""Size of a hash: collisions are out of reach."""

CPU_BLOCK_TOKENS: Final = 32
"""Size of a block on a CPU; docs/internals/decisions/paged-attention-cpu.md has the measurements."""
SHARE_TOKENS: Final = 64
"""Size of a unit if the block size is a multiple of it."""


class BlockTable:
    """The blocks of one sequence.

    Attributes:
        blocks: Block numbers in the order of the sequence's positions.
        hashes: Hashes of the sequence's full units, as far as they were needed.
        known_units: Leading units that can be found by hash, or are copies of such.
        block_units: Units per block.
    """

    __slots__ = ("block_units", "blocks", "hashes", "known_units", "tenant")

    def __init__(self, tenant: str = "") -> None:
        """Create an empty table; in a cache per tenant, `tenant` is the salt."""
        self.tenant = tenant.encode()
        self.blocks: list[int] = []
        self.hashes: list[bytes] = []
        self.known_units = 0
        self.block_units = 1

    @property
    def block_hashes(self) -> list[bytes]:
        """Hashes of the sequence's full blocks."""
        return self.hashes[self.block_units - 1 :: self.block_units]


class BlockManager:
    """The blocks of one cache."""

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        *,
        prefix_cache: PrefixCache = "tenant",
        share_tokens: int = SHARE_TOKENS,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.prefix_cache = prefix_cache
        self.share_tokens = block_tokens if block_tokens % share_tokens else share_tokens
        self._units = block_tokens // self.share_tokens
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._known_in: dict[int, list[bytes]] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def free_blocks(self) -> int:
        """Number of blocks that no sequence holds."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks for `tokens`."""
        return -(-tokens // self.block_tokens)

    def missing(self, table: BlockTable, tokens: Sequence[int]) -> bytes | None:
        """Return the hash of the first full unit of `tokens` that is not cached; None: all are, or caching is off."""
        self._hash(table, tokens, len(tokens))
        cached_units = self._cached_units(table)
        return table.hashes[cached_units] if cached_units < len(table.hashes) else None

    def open(
        self, table: BlockTable, tokens: Sequence[int], reserve: int = 0
    ) -> list[tuple[int, int]] | None:
        """Fill an empty table with blocks for `tokens`, with shared ones as far as possible.

        At least the last token is left to compute: without it there are no logits.

        - `reserve`: Number of blocks that must stay free.

        Returns:
            Blocks to copy before anything is computed, as (from, to). Without enough blocks None, and nothing has
            changed.
        """
        assert not table.blocks
        self._hash(table, tokens, len(tokens))
        # A sequence that was here before has hashes of tokens behind these.
        cached_units = min(self._cached_units(table), len(tokens) // self.share_tokens)
        block_count = self.blocks_for(len(tokens))
        shared, partial_units = divmod(cached_units, self._units)
        whole = not partial_units and shared * self.block_tokens == len(tokens)
        # A fully cached prompt needs one block more, for the copy of its last block; without it, compute the last unit.
        if whole and not self._affords(table, shared, block_count + 1 - shared, reserve):
            cached_units, whole = cached_units - 1, False
            shared, partial_units = divmod(cached_units, self._units)
        if not self._affords(table, shared, block_count + whole - shared, reserve):
            return None
        # The block may be reused for this very sequence: copies are made before anything is written.
        source = self._block_of[table.hashes[cached_units - 1]] if partial_units else None
        # Take the shared blocks first: idle ones could be evicted for the fresh ones.
        for digest in table.block_hashes[:shared]:
            table.blocks.append(self._hold_block(self._block_of[digest]))
        table.known_units = cached_units
        # The last token is computed again and writes into its block, which others may share.
        copies = [self._own_last(table)] if whole else []
        self.grow(table, len(tokens))
        if source is not None and source != table.blocks[shared]:
            copies.append((source, table.blocks[shared]))
        return copies

    def cached_tokens(self, table: BlockTable, tokens: int) -> int:
        """Return how many of the `tokens` of a table just opened need not be computed."""
        return min(table.known_units * self.share_tokens, tokens - 1)

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Append blocks until `tokens` fit; without enough blocks return False and change nothing."""
        missing = self.blocks_for(tokens) - len(table.blocks)
        if missing <= 0:
            return True  # as at most steps
        if missing > self.free_blocks:
            return False
        for _ in range(missing):
            table.blocks.append(self._fresh())
        return True

    def computed(self, table: BlockTable, tokens: Sequence[int], count: int) -> None:
        """Register the units that are full, after the first `count` of `tokens` were computed."""
        full = count // self.share_tokens
        if full <= table.known_units or self.prefix_cache == "off":
            return
        self._hash(table, tokens, count)
        # Another sequence may have registered the same unit meanwhile: the first one stays.
        for place in range(table.known_units, full):
            digest, block = table.hashes[place], table.blocks[place // self._units]
            if digest not in self._block_of:
                self._block_of[digest] = block
                self._known_in.setdefault(block, []).append(digest)
        table.known_units = full

    def close(self, table: BlockTable) -> list[int]:
        """Empty a table; return the blocks that are free now."""
        # From the last block on, so that idle blocks at the end of a prompt are evicted first.
        freed = [block for block in reversed(table.blocks) if self._dropped(block)]
        table.blocks = []
        table.known_units = 0
        return freed

    def discard(self, table: BlockTable) -> list[int]:
        """Close the table of a sequence whose cache content is not trusted: none of its blocks stays cached."""
        for block in table.blocks:
            self._forget(block)
        return self.close(table)

    def _hash(self, table: BlockTable, tokens: Sequence[int], count: int) -> None:
        if self.prefix_cache == "off":
            return
        size, hashes = self.share_tokens, table.hashes
        salt = table.tenant if self.prefix_cache == "tenant" else b""
        table.block_units = self._units
        for place in range(len(hashes), count // size):
            before = hashes[-1] if hashes else salt
            content = array("I", tokens[place * size : (place + 1) * size]).tobytes()
            hashes.append(hashlib.blake2b(before + content, digest_size=_DIGEST_BYTES).digest())

    def _cached_units(self, table: BlockTable) -> int:
        """Return the number of leading units that can be found by hash."""
        for place, digest in enumerate(table.hashes):
            if digest not in self._block_of:
                return place
        return len(table.hashes)

    def _affords(self, table: BlockTable, shared: int, fresh: int, reserve: int) -> bool:
        """Return whether `fresh` blocks exist beside the `shared` cached ones, which may be idle themselves."""
        cached = (self._block_of[digest] for digest in table.block_hashes[:shared])
        idle = sum(self._references[block] == 0 for block in cached)
        return self.free_blocks - idle >= fresh + reserve

    def _hold_block(self, block: int) -> int:
        self._references[block] += 1
        self._idle.pop(block, None)
        return block

    def _fresh(self) -> int:
        if self._free:
            return self._hold_block(heapq.heappop(self._free))
        # No free block is left: evict the idle one that was used longest ago.
        block, _ = self._idle.popitem(last=False)
        self._forget(block)
        return self._hold_block(block)

    def _own_last(self, table: BlockTable) -> tuple[int, int]:
        """Replace the last block by a new one (copy on write); return (from, to)."""
        shared = table.blocks[-1]
        own = self._fresh()
        table.blocks[-1] = own
        self._dropped(shared)
        return shared, own

    def _dropped(self, block: int) -> bool:
        """Remove one reference; return whether the block is free now."""
        self._references[block] -= 1
        assert self._references[block] >= 0, f"block {block} was given back twice"
        if self._references[block]:
            return False
        # Its units can still be found: keep the content until the block is needed.
        if block in self._known_in:
            self._idle[block] = None
            return False
        heapq.heappush(self._free, block)
        return True

    def _forget(self, block: int) -> None:
        for digest in self._known_in.pop(block, ()):
            del self._block_of[digest]
