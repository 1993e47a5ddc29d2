"""What all models of one batcher process share."""

from collections.abc import Callable
from dataclasses import dataclass

from nats.aio.client import Client

from batcher.core.peers import Peers
from batcher.delivery import Delivery
from batcher.spans import RowSpans


@dataclass(frozen=True)
class Process:
    """One batcher.

    Attributes:
        batcher: its id.
        peers: the batchers beside it.
        on_readiness: called when the readiness of a model changed.
    """

    nats_client: Client
    batcher: str
    delivery: Delivery
    spans: RowSpans
    peers: Peers
    on_readiness: Callable[[], None]
