from collections.abc import Sequence

from model_workers.engine.protocol import Sampling, SequenceEnd
from model_workers.engine.sequences import SequenceLimits
from model_workers.engine.values import ClassifierEngine
from tests.support.sequences import Answers, drive, sequence_spec

SAMPLING = Sampling(max_tokens=5, logprobs=True, top_logprobs=8, stop_token_ids=frozenset({1, 2}))


class Parity:
    """Judges by the first token; remembers what was computed together."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def logprobs(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        self.batches.append([len(text) for text in texts])
        return [[-0.1, -3.0, -4.0] if text[0] % 2 == 0 else [-5.0, -0.2, -2.0] for text in texts]


def engine(judge: Parity, *, slots: int = 4, prefill: int = 64) -> ClassifierEngine:
    return ClassifierEngine(judge.logprobs, SequenceLimits(slots, 8, 64, prefill))


def test_a_row_is_one_token_with_all_labels() -> None:
    judging = engine(Parity())
    judging.add(sequence_spec("r", [3, 4, 5], SAMPLING), 0.0)
    (step,) = judging.step(0.0)
    assert (step.token_ids, step.end) == ((1,), SequenceEnd.LENGTH)
    assert step.logprobs[0].logprob == -0.2
    assert step.logprobs[0].top == ((1, -0.2), (2, -2.0), (0, -5.0))
    assert not judging.has_sequences()


def test_long_texts_do_not_stall_a_step() -> None:
    judge = Parity()
    judging = engine(judge, prefill=10)
    for name, size in (("a", 6), ("b", 8), ("c", 3)):
        judging.add(sequence_spec(name, [2] * size, SAMPLING), 0.0)
    answers = Answers()
    while judging.has_sequences():
        answers.take(judging.step(0.0))
    assert judge.batches == [[6], [8, 3]]
    assert set(answers.ends.values()) == {SequenceEnd.LENGTH}


def test_cancelled_and_late_rows_are_not_computed() -> None:
    judge = Parity()
    judging = engine(judge)
    for name, deadline in (("a", None), ("b", 5.0), ("c", None)):
        judging.add(sequence_spec(name, [2, 2], SAMPLING, deadline=deadline), 0.0)
    judging.cancel(["a"])
    answers = Answers()
    answers.take(judging.step(6.0))
    assert answers.ends["a"] is SequenceEnd.CANCELLED
    assert answers.ends["b"] is SequenceEnd.DEADLINE
    assert judge.batches == [[2]]


def test_a_row_that_was_judged_before_ends_at_once() -> None:
    judge = Parity()
    assert (
        drive(engine(judge), sequence_spec("r", [2], SAMPLING, produced=[1])).ends["r"]
        is SequenceEnd.LENGTH
    )
    assert judge.batches == []


def test_after_a_fault_all_rows_end_and_the_engine_is_usable() -> None:
    judging = engine(Parity())
    judging.add(sequence_spec("r", [2], SAMPLING), 0.0)
    assert [step.end for step in judging.abort("broken")] == [SequenceEnd.RETURNED]
    judging.add(sequence_spec("r", [2], SAMPLING), 0.0)
    assert judging.load().running == 0
    assert judging.step(0.0)[0].end is SequenceEnd.LENGTH
