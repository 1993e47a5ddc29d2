"""Requests that were cancelled lately, in case a cancel overtook its task."""

from collections import OrderedDict
from typing import Final

DEPARTED_MAX: Final = 8192


class Departed:
    """The last `DEPARTED_MAX` of them."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request_id: str) -> None:
        """Remembers one; the oldest makes room."""
        self._requests[request_id] = None
        if len(self._requests) > DEPARTED_MAX:
            self._requests.popitem(last=False)
