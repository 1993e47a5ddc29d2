from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from model_workers.engine.sampling.state import TokenCounts

TOKENS = st.lists(st.integers(0, 60), max_size=80)


def held(token_counts: TokenCounts) -> dict[int, int]:
    return dict(zip(token_counts.tokens.tolist(), token_counts.counts.tolist(), strict=True))


@given(TOKENS, TOKENS, TOKENS)
def test_all_tokens_once_and_those_of_the_answer_counted(
    prompt: list[int], produced: list[int], more: list[int]
) -> None:
    token_counts = TokenCounts(prompt, produced)
    behind = token_counts.after(more)
    assert held(token_counts) == {t: Counter(produced)[t] for t in {*prompt, *produced}}
    counts = Counter(produced + more)
    assert held(behind) == {t: counts[t] for t in {*prompt, *produced, *more}}
    token_counts.add(more)
    assert held(token_counts) == held(behind)
