"""A device that computes nothing before something is read from it: what the host uses earlier, it cannot know."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from model_workers.engine.paged_model import SequenceChunk
from model_workers.engine.sampling.distribution import draw
from model_workers.engine.sampling.sampler import DrawRequest, DrawResult, PendingDraw, Sampler
from tests.support.hash_model import HashModel


@dataclass
class Stream:
    """Work in its order; and what was begun and read."""

    waiting: list[Callable[[], object]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def run(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


class LazyModel(HashModel):
    """`HashModel` on a stream; its logits are a list that holds them later."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stream = Stream()

    def forward(self, chunks: Sequence[SequenceChunk]) -> Any:
        sent = [replace(c, tokens=tuple(c.tokens), blocks=tuple(c.blocks)) for c in chunks]
        logits: list[Any] = []
        compute = super().forward
        self.stream.events.append("begin")
        self.stream.waiting.append(lambda: logits.append(compute(sent)))
        return logits

    def feed(self, drawn: Any) -> None:
        keep = super().feed
        self.stream.waiting.append(lambda: keep(drawn[0]))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        sent, copy = tuple(pairs), super().copy_blocks
        self.stream.waiting.append(lambda: copy(sent))

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        sent, clear = tuple(blocks), super().clear_blocks
        self.stream.waiting.append(lambda: clear(sent))


@dataclass
class LazyDraw:
    """See `PendingDraw`."""

    tokens: list[Any]
    stream: Stream
    take: Callable[[], list[DrawResult]]

    def read(self) -> list[DrawResult]:
        self.stream.events.append("read")
        self.stream.run()
        return self.take()


class LazySampler(Sampler):
    """`Sampler` on a stream."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def begin(self, logits: Any, requests: Sequence[DrawRequest]) -> Any:
        places = [list(request.state.positions(request.drafted)) for request in requests]
        positions = list(chain.from_iterable(places))
        found: list[Any] = []
        self._stream.waiting.append(lambda: found.extend(draw(logits[0], positions)))
        for request in requests:
            request.state.begin()
        return LazyDraw(found, self._stream, lambda: PendingDraw(requests, places, *found).read())
