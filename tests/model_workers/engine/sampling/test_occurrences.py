from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from model_workers.engine.sampling.occurrences import Occurrences

TOKENS = st.lists(st.integers(0, 60), max_size=80)


def held(occurrences: Occurrences) -> dict[int, int]:
    return dict(zip(occurrences.tokens.tolist(), occurrences.counts.tolist(), strict=True))


@given(TOKENS, TOKENS, TOKENS)
def test_all_tokens_once_and_those_of_the_answer_counted(
    prompt: list[int], produced: list[int], more: list[int]
) -> None:
    occurrences = Occurrences(prompt, produced)
    behind = occurrences.behind(more)
    assert held(occurrences) == {t: Counter(produced)[t] for t in {*prompt, *produced}}
    counts = Counter(produced + more)
    assert held(behind) == {t: counts[t] for t in {*prompt, *produced, *more}}
    occurrences.add(more)
    assert held(occurrences) == held(behind)
