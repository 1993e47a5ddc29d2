"""A paged model without weights, whose tokens depend on every byte of the cache that a sequence may see."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from model_workers.engine.paged_engine import PagedEngine
from model_workers.engine.paged_model import SequenceChunk
from model_workers.engine.protocol import Sampling, SequenceSpec
from model_workers.engine.sampling.sampler import Sampler
from model_workers.engine.speculation import Speculator
from sluice.settings.models import PrefixCache
from tests.support.sequences import Answers, drive, sequence_spec

VOCABULARY = 64
NAN_TOKEN = 62
"""Rows that contain it have no logits behind it."""
OOM_TOKEN = 63
"""A step that has to compute it runs out of memory."""
SHARED = list(range(1, 25))
"""Prompts begin with pieces of it, so that they share blocks."""
_NAN = b"nan"


@dataclass
class HashModel:
    """See `PagedModel`. Each cell of the cache holds the hash of all tokens up to its position.

    It is read back through the block tables: a wrong table, a lost copy or an overwritten shared block changes what is
    drawn. What a chunk writes is seen by other chunks only in later steps.
    """

    num_blocks: int = 64
    block_tokens: int = 4
    context_tokens: int = 64
    vocab_size: int = VOCABULARY
    wrong: int = 0
    """Of 256 contexts, in how many it has other logits than a model without: a bad draft."""
    computed_tokens: int = 0
    largest_prefill: int = 0
    chunks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cells: dict[tuple[int, int], bytes] = {}
        self.fed: list[int] = []

    def feed(self, drawn: Tensor) -> None:
        self.fed = drawn.tolist()

    def forward(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        tokens = [len(chunk.tokens) for chunk in chunks]
        self.largest_prefill = max(self.largest_prefill, sum(n for n in tokens if n > 1))
        if any(OOM_TOKEN in chunk.tokens for chunk in chunks):
            raise torch.OutOfMemoryError("not enough memory")
        self.computed_tokens += sum(tokens)
        self.chunks.append(len(chunks))
        written: dict[tuple[int, int], bytes] = {}
        logits = [sequence for chunk in chunks for sequence in self._computed(chunk, written)]
        self.cells |= written
        return torch.from_numpy(np.array(logits, np.float32).reshape(-1, VOCABULARY))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            HashModel.clear_blocks(self, [target])
            for place in range(self.block_tokens):
                if (source, place) in self.cells:
                    self.cells[target, place] = self.cells[source, place]

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            for place in range(self.block_tokens):
                self.cells.pop((block, place), None)

    def _computed(
        self, chunk: SequenceChunk, written: dict[tuple[int, int], bytes]
    ) -> list[list[float]]:
        assert len(chunk.tokens) > 0
        assert chunk.start + len(chunk.tokens) <= self.context_tokens
        state = self.cells[self._cell(chunk, chunk.start - 1)] if chunk.start else b""
        states = []
        for position, token in enumerate(chunk.tokens, chunk.start):
            state = _next(state, token if token >= 0 else max(self.fed[-1 - token], 0))
            cell = self._cell(chunk, position)
            assert written.get(cell, state) == state, "two sequences write into one cell"
            written[cell] = state
            states.append(state)
        return [
            _logits(b"wrong" if state[0] < self.wrong else state)
            for state in states[len(states) - chunk.logits :]
        ]

    def _cell(self, chunk: SequenceChunk, position: int) -> tuple[int, int]:
        block = chunk.blocks[position // self.block_tokens]
        assert 0 <= block < self.num_blocks
        return block, position % self.block_tokens


def _next(state: bytes, token: int) -> bytes:
    if token == NAN_TOKEN or state == _NAN:
        return _NAN
    return hashlib.blake2b(state + token.to_bytes(4, "little"), digest_size=8).digest()


def _logits(state: bytes) -> list[float]:
    if state == _NAN:
        return [float("nan")] * VOCABULARY
    values = hashlib.blake2b(state, digest_size=VOCABULARY).digest()
    # The special tokens are never drawn.
    return [value / 16 for value in values[:NAN_TOKEN]] + [-100.0, -100.0]


def greedy(prompt: Sequence[int], tokens: int) -> list[int]:
    """What the model answers, computed without cache, engine and sampler."""
    state = b""
    for token in prompt:
        state = _next(state, token)
    answer: list[int] = []
    while len(answer) < tokens:
        logits = _logits(state)
        answer.append(logits.index(max(logits)))
        state = _next(state, answer[-1])
    return answer


def hash_engine(
    model: HashModel | None = None,
    *,
    slots: int = 4,
    max_waiting: int = 1000,
    prefill_tokens: int = 16,
    prefix_cache: PrefixCache = "tenant",
    speculator: Speculator | None = None,
    overlap: bool = False,
    sampler: Sampler | None = None,
) -> PagedEngine:
    """An engine over ``model``, or over one with a large cache."""
    return PagedEngine(
        model or HashModel(),
        sampler or Sampler(),
        slots=slots,
        max_waiting=max_waiting,
        prefill_tokens=prefill_tokens,
        prefix_cache=prefix_cache,
        speculator=speculator,
        overlap=overlap,
    )


def alone(sequence: SequenceSpec) -> Answers:
    """What a sequence answers with an engine for itself, in one piece."""
    return drive(hash_engine(prefill_tokens=1000, prefix_cache="off"), sequence)


@st.composite
def sequences(draw: st.DrawFn) -> list[SequenceSpec]:
    """Rows that share prefixes, of all ranks, greedy and random, some resumed."""
    found = []
    for i in range(draw(st.integers(1, 12))):
        begin = draw(st.integers(0, len(SHARED)))
        end = draw(st.lists(st.integers(0, 9), min_size=not begin, max_size=12))
        sampling = Sampling(
            max_tokens=draw(st.integers(1, 24)),
            temperature=draw(st.sampled_from((0.0, 0.0, 1.5))),
            repetition_penalty=draw(st.sampled_from((1.0, 1.0, 1.3))),
            seed=i,
            stop_token_ids=frozenset(draw(st.sets(st.integers(0, 61), max_size=2))),
        )
        rank = draw(st.integers(0, 2))
        found.append(sequence_spec(f"r{i}", SHARED[:begin] + end, sampling, rank=rank))
    return found


def busy(engine: PagedEngine) -> bool:
    """Whether the engine has sequences; and what must hold between any two steps."""
    load = engine.load()
    assert 0 <= load.free_blocks <= load.cache_blocks
    assert load.running <= load.slots
    if not engine.has_sequences():
        assert load.free_blocks == load.cache_blocks, "blocks are lost"
        assert load.running_tokens == load.waiting_tokens == 0
    return engine.has_sequences()
