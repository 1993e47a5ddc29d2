import random

import pytest

from batcher.core.scheduler.entry import QueueEntry
from batcher.core.scheduler.estimates import GUESS_TOKENS, KEYS_MAX, TRUSTED_FROM, OutputLengths


def task(tenant: str = "a", workload: str = "w", max_tokens: int = 1000) -> QueueEntry:
    return QueueEntry(
        "r", "bulk", tenant=tenant, workload=workload, prompt_tokens=10, max_tokens=max_tokens
    )


def expected(lengths: OutputLengths, of: QueueEntry, produced: int = 0) -> tuple[int, int]:
    """Tokens of the answer that are charged, and that room is kept for."""
    of.prefill_tokens = of.prompt_tokens + produced
    lengths.estimate(of)
    return of.cost_tokens - of.prompt_tokens, of.cache_tokens - of.prompt_tokens


def learn(lengths: OutputLengths, of: QueueEntry, answers: int, tokens: int) -> None:
    for _ in range(answers):
        lengths.observe(of, tokens)


def test_unknown_answer_is_charged_little_and_reserves_all() -> None:
    assert expected(OutputLengths(0.9), task()) == (GUESS_TOKENS, 1000)
    assert expected(OutputLengths(0.9), task(max_tokens=5)) == (5, 5)


def test_few_answers_say_nothing() -> None:
    lengths = OutputLengths(0.9)
    learn(lengths, task(), TRUSTED_FROM - 1, 20)
    assert expected(lengths, task()) == (GUESS_TOKENS, 1000)
    learn(lengths, task(), 1, 20)
    charged, kept = expected(lengths, task())
    assert (charged, kept) == (20, pytest.approx(20, abs=8))


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.95])
def test_mean_and_quantile_follow_changing_answers(quantile: float) -> None:
    chance, lengths = random.Random(1), OutputLengths(quantile)
    for median in (200, 30):
        drawn = [int(chance.lognormvariate(0, 0.7) * median) + 1 for _ in range(3000)]
        for tokens in drawn:
            lengths.observe(task(max_tokens=10_000), tokens)
        charged, kept = expected(lengths, task(max_tokens=10_000))
        assert charged == pytest.approx(sum(drawn) / len(drawn), rel=0.35)
        longer = sum(tokens > kept for tokens in drawn) / len(drawn)
        assert longer == pytest.approx(1 - quantile, abs=0.15)


def test_no_answer_is_longer_than_it_may_be() -> None:
    lengths = OutputLengths(0.9)
    learn(lengths, task(), 20, 500)
    assert expected(lengths, task(max_tokens=50)) == (50, 50)


def test_a_tenant_that_is_new_to_a_workload_is_like_the_others() -> None:
    lengths = OutputLengths(0.9)
    learn(lengths, task("a"), 20, 30)
    assert expected(lengths, task("b"))[0] == 30
    learn(lengths, task("b"), 20, 300)
    assert expected(lengths, task("b"))[0] == 300
    assert expected(lengths, task("a"))[0] == 30


def test_what_has_outlived_expectations_is_expected_to_double() -> None:
    lengths = OutputLengths(0.9)
    learn(lengths, task(), 20, 30)
    assert expected(lengths, task(), produced=100) == (200, 200)
    assert expected(lengths, task(max_tokens=150), produced=100) == (150, 150)


def test_what_was_guessed_is_told_from_what_is_known() -> None:
    lengths = OutputLengths(0.9)
    guessed = task()
    lengths.estimate(guessed)
    assert guessed.guessed
    learn(lengths, task(), 20, 30)
    lengths.estimate(guessed)
    assert (guessed.guessed, guessed.cost_tokens) == (False, 40)


def test_memory_is_bounded_whatever_callers_call_their_workloads() -> None:
    lengths = OutputLengths(0.9)
    for number in range(KEYS_MAX):
        learn(lengths, task(workload=str(number)), 1, 30)
    assert len(lengths) == KEYS_MAX
