"""Packing chunks: nothing is lost, nothing is padded."""

from hypothesis import given
from hypothesis import strategies as st

from model_workers.engine.forward.packing import SHORT_TOKENS, pack
from model_workers.engine.paged_model import SequenceChunk

BLOCK_TOKENS = 4


@st.composite
def chunks(draw: st.DrawFn) -> list[SequenceChunk]:
    found = []
    for row in range(draw(st.integers(1, 6))):
        count = draw(st.sampled_from((1, 1, 3, SHORT_TOKENS, SHORT_TOKENS + 1, 40)))
        start = draw(st.integers(0, 20))
        blocks = range(100 * row, 100 * row + (start + count) // BLOCK_TOKENS + 1)
        tokens = tuple(range(1000 * row + start, 1000 * row + start + count))
        found.append(SequenceChunk(tokens, start, blocks, draw(st.integers(0, count))))
    return found


@given(chunks())
def test_every_token_has_its_position_and_its_place_in_the_cache(
    given_chunks: list[SequenceChunk],
) -> None:
    step = pack(given_chunks, BLOCK_TOKENS)
    expected = {
        (token, chunk.start + i, chunk.blocks[(chunk.start + i) // BLOCK_TOKENS])
        for chunk in given_chunks
        for i, token in enumerate(chunk.tokens)
    }
    found = list(zip(step.tokens, step.positions, step.blocks, strict=True))
    assert len(found) == len(expected)
    assert {(int(t), int(p), int(b)) for t, p, b in found} == expected
    assert list(step.offsets) == [p % BLOCK_TOKENS for p in step.positions]


@given(chunks())
def test_wanted_places_are_in_the_order_of_the_chunks(given_chunks: list[SequenceChunk]) -> None:
    step = pack(given_chunks, BLOCK_TOKENS)
    wanted = [t for c in given_chunks for t in c.tokens[len(c.tokens) - c.logits :]]
    assert list(step.tokens[step.wanted]) == wanted


@given(chunks())
def test_short_chunks_come_first(given_chunks: list[SequenceChunk]) -> None:
    step = pack(given_chunks, BLOCK_TOKENS)
    assert all(span.count <= SHORT_TOKENS for span in step.short)
    assert all(span.count > SHORT_TOKENS for span in step.long)
    assert step.short_tokens == sum(span.count for span in step.short)
    places = [
        place for s in (*step.short, *step.long) for place in range(s.first, s.first + s.count)
    ]
    assert places == list(range(len(step.tokens)))
