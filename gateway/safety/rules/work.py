"""What an inspection did, counted: the bound on its cost is asserted on these numbers, not on a clock."""

from dataclasses import dataclass


@dataclass(slots=True)
class Work:
    """Counts of one scan. Every unit is bounded work, so their sum bounds the cost."""

    bytes_scanned: int = 0
    """Bytes that went through a matching engine, counted once per pass."""
    candidates: int = 0
    """Matches of patterns that a validator was asked about."""
    chars_read: int = 0
    """Characters that validators read beyond the match."""
    bytes_decoded: int = 0
    """Bytes that came out of encoded payloads."""
