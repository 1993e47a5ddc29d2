"""Pages of lists (AIP-158)."""

from collections.abc import Sequence
from typing import TypeVar

from sluice.errors import InvalidRequest

T = TypeVar("T")


def page_of(entries: Sequence[T], size: int, token: str) -> tuple[Sequence[T], str]:
    """The page that ``token`` names, of at most ``size`` entries (0: all), and the token of the next one.

    A token is the number of the first entry.

    Raises:
        InvalidRequest: the token is none.
    """
    if token and not (token.isascii() and token.isdecimal() and len(token) < 10):
        raise InvalidRequest.of("page_token", "is none; take next_page_token of the page before")
    start = int(token or 0)
    end = start + size if size else len(entries)
    return entries[start:end], str(end) if end < len(entries) else ""
