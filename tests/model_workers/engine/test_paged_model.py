import logging
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model_workers.engine.paged_model import Fault, FaultIsolator, SequenceChunk
from tests.support.hash_model import HashModel


class Fragile(HashModel):
    """Raises where a chunk begins with a bad token; logits are the first tokens of the chunks."""

    def __init__(self, message: str = "out of memory") -> None:
        super().__init__()
        self.message = message

    def forward(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        if any(chunk.tokens[0] < 0 for chunk in chunks):
            raise RuntimeError(self.message)
        firsts = [float(chunk.tokens[0]) for chunk in chunks for _ in range(chunk.logits)]
        return torch.tensor(firsts)[:, None].expand(-1, self.vocab_size)


def chunks(tokens: Sequence[int], logits: Sequence[int]) -> list[SequenceChunk]:
    return [SequenceChunk([token], 0, [0], n) for token, n in zip(tokens, logits, strict=True)]


@given(st.lists(st.tuples(st.integers(-2, 9), st.integers(0, 3)), min_size=1, max_size=20))
def test_only_the_chunks_that_break_a_step_are_lost(pairs: list[tuple[int, int]]) -> None:
    tokens, wanted = zip(*pairs, strict=True)
    logits, broken = FaultIsolator(Fragile()).forward(chunks(tokens, wanted))
    assert set(broken) == {place for place, token in enumerate(tokens) if token < 0}
    assert logits.shape[1] == 64
    assert logits[:, 0].tolist() == [t for t, n in pairs if t >= 0 for _ in range(n)]


def test_a_lack_of_memory_is_named_and_the_fault_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        _, broken = FaultIsolator(Fragile()).forward(chunks([1, -1, 2, 3], [1] * 4))
    message = (
        "not enough memory to compute this sequence; lower prefill_tokens, cache_gb or memory_share"
    )
    assert broken == {1: Fault(message)}
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("beside", "of_sequence"), [(1, True), (0, False)])
def test_a_row_is_at_fault_when_others_were_computed(beside: int, of_sequence: bool) -> None:
    model = Fragile("a fault")
    _, broken = FaultIsolator(model).forward(chunks([-1] + [1] * beside, [1] * (1 + beside)))
    assert broken == {0: Fault("the model failed on this sequence: RuntimeError", of_sequence)}


class Small(HashModel):
    """Has memory for steps of 40 tokens."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.computed: list[tuple[int, int]] = []

    def forward(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        if sum(len(chunk.tokens) for chunk in chunks) > 40:
            raise self.error
        self.computed += [(chunk.start, len(chunk.tokens)) for chunk in chunks]
        return torch.ones(sum(chunk.logits for chunk in chunks), self.vocab_size)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("could not create a primitive"),
    ],
    ids=str,
)
def test_chunk_is_split_when_memory_is_short(error: Exception) -> None:
    model = Small(error)
    logits, broken = FaultIsolator(model).forward([SequenceChunk(range(130), 7, [0], 2)])
    assert (len(logits), broken) == (2, {})
    starts = [start for start, _ in model.computed]
    assert starts == sorted(starts)
    assert starts[0] == 7
    assert sum(count for _, count in model.computed) == 130
