"""Which ids a job has used: hashes of 8 bytes in one table, 12 to 24 bytes an id instead of about 120 in a set."""

from array import array
from hashlib import blake2b
from typing import Final

_FIRST: Final = 1 << 10
_LOAD_MAX: Final = 2 / 3


class SeenIds:
    """A set of ids. A million cost 16 MiB; that one of a million is taken for another has a probability of 3e-8."""

    def __init__(self) -> None:
        self._table = array("Q", bytes(8 * _FIRST))
        self._count = 0

    def add(self, custom_id: str) -> bool:
        """Whether `custom_id` is new; from now on it is not."""
        digest = blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        if not self._put(int.from_bytes(digest, "little") or 1):  # 0 is an empty place
            return False
        self._count += 1
        if self._count > _LOAD_MAX * len(self._table):
            self._grow()
        return True

    def _put(self, key: int) -> bool:
        table, mask = self._table, len(self._table) - 1
        at = key & mask
        while table[at]:
            if table[at] == key:
                return False
            at = (at + 1) & mask
        table[at] = key
        return True

    def _grow(self) -> None:
        keys = self._table
        self._table = array("Q", bytes(16 * len(keys)))
        for key in keys:
            if key:
                self._put(key)
