"""Whole padded batches: each sequence gets what transformers generates for it alone."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from model_workers.engine.generate.engine import GenerateEngine
from model_workers.engine.generate.model import Batching, GenerateModel
from model_workers.engine.protocol import (
    Sampling,
    SequenceEnd,
    SequenceSpec,
)
from model_workers.engine.sampling.sampler import Sampler
from model_workers.engine.sequences import SequenceLimits
from sluice.errors import InvalidRequest, PromptTooLong
from sluice.internal.v1 import task_pb2
from sluice.settings.models import SideLimits
from tests.support.generating_models import END, FAMILIES, PICTURE, tiny
from tests.support.tiny_seq2seq import POSITIONS, tiny_seq2seq
from tests.support.tiny_seq2seq import VOCABULARY as WORDS

CONTEXT = 128
SEQ2SEQ = ("t5", "bart seq2seq")
BATCHING = {"bart": Batching.EQUAL_LENGTHS, "rwkv": Batching.ALONE}
"""Of decoders whose answers padding changes, or any batch."""


def model_of(family: str) -> Any:
    return tiny_seq2seq(family.split()[0]) if family in SEQ2SEQ else tiny(family)


class Recorded(GenerateModel):
    """Notes the batches.

    Attributes:
        batches: the lengths of the sequences of each.
    """

    def __init__(self, model: Any, batching: Batching = Batching.PADDED) -> None:
        super().__init__(model, batching)
        self.batches: list[list[int]] = []

    def generate(self, sequences: Sequence[Sequence[int]], *rest: Any, **options: Any) -> Any:
        self.batches.append([len(sequence) for sequence in sequences])
        return super().generate(sequences, *rest, **options)


def engine_of(
    family: str = "llama", slots: int = 8, context: int = CONTEXT
) -> tuple[GenerateEngine, Recorded]:
    model = Recorded(model_of(family), BATCHING.get(family, Batching.PADDED))
    limits = SequenceLimits(slots, 64, context, 512)
    sides = SideLimits(POSITIONS, POSITIONS, 2 * POSITIONS) if family in SEQ2SEQ else None
    return GenerateEngine(model, Sampler(), limits, sides), model


def sequence(name: str, prompt: Sequence[int], tokens: int = 10, **fields: Any) -> SequenceSpec:
    stops = frozenset({fields.pop("end", END)})
    sampling = Sampling(tokens, stop_token_ids=stops, **fields.pop("sampling", {}))
    given = {"attempt": 0, "produced": (), **fields}
    return SequenceSpec(name, "b", prompt=tuple(prompt), sampling=sampling, **given)


def prompts(count: int, seed: int = 1) -> list[tuple[int, ...]]:
    draw = random.Random(seed)
    return [
        tuple(draw.randrange(3, WORDS - 1) for _ in range(draw.randrange(1, 30)))
        for _ in range(count)
    ]


def run(engine: GenerateEngine, sequences: Sequence[SequenceSpec] = ()) -> dict[str, list[int]]:
    """Compute all sequences; returns their answers, tokens of earlier attempts included."""
    for one in sequences:
        engine.add(one, 0.0)
    answers = {one.request_id: list(one.produced) for one in sequences}
    while engine.has_sequences():
        for step in engine.step(0.0):
            said = answers.setdefault(step.request_id, [])
            assert not sequences or step.start_index == len(said)
            said += step.token_ids
    return answers


@cache
def reference(family: str) -> Any:
    return model_of(family)


def generated(family: str, prompt: Sequence[int], tokens: int) -> list[int]:
    """What transformers' own loop answers to a prompt alone."""
    model = reference(family)
    answer = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=tokens + (family == "bart seq2seq"),
        do_sample=False,
        num_beams=1,
        forced_eos_token_id=None,
    )[0].tolist()
    if family in SEQ2SEQ:
        return answer[2 if family == "bart seq2seq" else 1 :]
    return answer[len(prompt) :]


@pytest.mark.parametrize("family", [*FAMILIES, *SEQ2SEQ])
def test_batches_give_each_row_its_own_answer(family: str) -> None:
    engine, _ = engine_of(family)
    end = 1 if family in SEQ2SEQ else END
    sequences = [sequence(str(n), one, 3 + n, end=end) for n, one in enumerate(prompts(7))]
    answers = run(engine, sequences)
    for one in sequences:
        assert answers[one.request_id] == generated(family, one.prompt, one.sampling.max_tokens)
    assert len({tuple(answer) for answer in answers.values()}) > 3, "the models say something"


@pytest.mark.parametrize("family", ["llama", "bart", "mamba", "t5", "bart seq2seq"])
def test_rows_continue_behind_earlier_tokens(family: str) -> None:
    first, *others = prompts(4, seed=3)
    end = 1 if family in SEQ2SEQ else END
    whole = generated(family, first, 20)
    engine, _ = engine_of(family)
    for held in range(1, len(whole), 8):
        again = sequence("again", first, 20, produced=tuple(whole[:held]), attempt=1, end=end)
        sequences = [sequence(str(n), one, 20, end=end) for n, one in enumerate(others)]
        assert run(engine, [*sequences, again])["again"] == whole


def test_one_token_of_every_row_is_one_step() -> None:
    engine, model = engine_of()
    for n, one in enumerate(prompts(3)):
        engine.add(sequence(str(n), one, 4 + n, end=-1), 0.0)
    counts = [len(engine.step(0.0)) for _ in range(6)]
    assert counts == [3, 3, 3, 3, 2, 1]
    assert not engine.has_sequences()
    assert len(model.batches) == 1


def test_batcher_batches_are_padded_batches() -> None:
    engine, model = engine_of()
    for n, length in enumerate((3, 40, 4, 44)):
        batch = "short" if length < 10 else "long"
        engine.add(sequence(str(n), range(3, 3 + length), 2, batch=batch), 0.0)
    run(engine)
    assert model.batches == [[3, 4], [40, 44]]


def test_rows_of_like_length_join_other_batches() -> None:
    engine, model = engine_of()
    for n, length in enumerate((20, 18, 7, 20, 30)):
        engine.add(sequence(str(n), range(3, 3 + length), 2, batch=f"batch {n}"), 0.0)
    run(engine)
    assert model.batches == [[20, 18, 20], [7], [30]]


def test_nothing_joins_a_running_batch() -> None:
    engine, model = engine_of()
    engine.add(sequence("1", (5, 6), 3, end=-1), 0.0)
    engine.step(0.0)
    engine.add(sequence("2", (5, 6), 3, end=-1), 0.0)
    load = engine.load()
    assert (load.running, load.waiting, load.batch_running) == (1, 1, True)
    run(engine)
    assert model.batches == [[2], [2]]
    assert not engine.load().batch_running


def test_urgent_rows_begin_the_next_batch() -> None:
    engine, model = engine_of(slots=1)
    for rank, length in ((2, 9), (0, 3), (1, 6)):
        engine.add(sequence(str(rank), range(3, 3 + length), 1, rank=rank), 0.0)
    run(engine)
    assert model.batches == [[3], [6], [9]]


def test_batches_never_exceed_slots_or_cache() -> None:
    engine, model = engine_of(slots=4, context=64)
    # 4 sequences of 50 + 60 columns would be more cells than 4 sequences of the context.
    engine.add(sequence("long", range(3, 53), 10, end=-1), 0.0)
    for n in range(6):
        engine.add(sequence(str(n), (5, 6, 7), 60, end=-1), 0.0)
    run(engine)
    assert max(map(len, model.batches)) <= 4
    assert model.batches[0] == [50, 3]


def test_models_that_cannot_be_padded_get_equal_lengths() -> None:
    engine, model = engine_of("bart")
    for n, length in enumerate((3, 5, 3, 5, 4)):
        engine.add(sequence(str(n), range(3, 3 + length), 2), 0.0)
    run(engine)
    assert model.batches == [[3, 3], [5, 5], [4]]


def test_models_that_no_batch_suits_get_one_row() -> None:
    engine, model = engine_of("rwkv")
    for n in range(3):
        engine.add(sequence(str(n), (5 + n, 6), 2), 0.0)
    run(engine)
    assert model.batches == [[2], [2], [2]]


def test_cancelled_and_late_rows_end_at_the_next_token() -> None:
    engine, _ = engine_of()
    engine.add(sequence("gone", (5, 6), 30, end=-1), 0.0)
    engine.add(sequence("late", (5, 6, 7), 30, end=-1, deadline=5.0), 0.0)
    engine.add(sequence("stays", (5, 6, 7, 8), 30, end=-1), 0.0)
    engine.step(0.0)
    engine.cancel(["gone"])
    steps = engine.step(6.0)
    ends = {step.request_id: step.end for step in steps if step.end is not None}
    assert ends == {"gone": SequenceEnd.CANCELLED, "late": SequenceEnd.DEADLINE}
    assert [step.request_id for step in steps if step.token_ids] == ["stays"]
    model = reference("llama")
    expected = model.generate(
        torch.tensor([[5, 6, 7, 8]]), max_new_tokens=30, do_sample=False, eos_token_id=[]
    )
    assert run(engine)["stays"] == expected[0, 4 + 2 :].tolist()


def test_batch_without_rows_is_left_at_once() -> None:
    engine, _ = engine_of()
    engine.add(sequence("1", (5, 6), 30, end=-1), 0.0)
    engine.step(0.0)
    engine.cancel(["1"])
    assert [step.end for step in engine.step(0.0)] == [SequenceEnd.CANCELLED]
    assert not engine.has_sequences()
    assert run(engine, [sequence("2", (5, 6, 7), 2)])["2"] == generated("llama", (5, 6, 7), 2)


def test_newer_attempt_replaces_a_running_row() -> None:
    engine, _ = engine_of()
    engine.add(sequence("1", (5, 6, 7), 20), 0.0)
    first = engine.step(0.0)[0].token_ids
    again = sequence("1", (5, 6, 7), 20, produced=first, attempt=1)
    assert run(engine, [again])["1"] == generated("llama", (5, 6, 7), 20)


def test_abort_returns_all_rows_and_the_engine_goes_on() -> None:
    engine, _ = engine_of()
    sequences = [sequence(str(n), one, 10) for n, one in enumerate(prompts(3))]
    for one in sequences:
        engine.add(one, 0.0)
    engine.step(0.0)
    assert {step.end for step in engine.abort("broken")} == {SequenceEnd.RETURNED}
    assert run(engine, sequences)["1"] == generated("llama", sequences[1].prompt, 10)


class Breaking(Recorded):
    """Fails with the sequence whose first token is 11."""

    def generate(self, sequences: Sequence[Sequence[int]], *rest: Any, **options: Any) -> Any:
        if any(one[0] == 11 for one in sequences):
            raise RuntimeError("cannot compute this")
        return super().generate(sequences, *rest, **options)


def test_row_that_breaks_a_batch_fails_alone() -> None:
    engine = GenerateEngine(Breaking(tiny("llama")), Sampler(), SequenceLimits(8, 64, CONTEXT, 512))
    sequences = [sequence(str(n), (n + 5, 6, 7), 5) for n in range(8)]
    for one in sequences:
        engine.add(one, 0.0)
    answers: dict[str, list[int]] = {}
    failed = []
    while engine.has_sequences():
        for step in engine.step(0.0):
            answers.setdefault(step.request_id, []).extend(step.token_ids)
            failed += [(step.request_id, step.end)] if step.error else []
    assert failed == [("6", SequenceEnd.FAILED)]
    for one in sequences:
        if one.request_id != "6":
            assert answers[one.request_id] == generated("llama", one.prompt, 5)


def test_row_without_enough_memory_is_returned() -> None:
    class Full(Recorded):
        def generate(self, sequences: Sequence[Sequence[int]], *rest: Any, **options: Any) -> Any:
            if any(one[0] == 11 for one in sequences):
                raise torch.OutOfMemoryError
            return super().generate(sequences, *rest, **options)

    engine = GenerateEngine(Full(tiny("llama")), Sampler(), SequenceLimits(8, 64, CONTEXT, 512))
    for n, first in enumerate((5, 11)):
        engine.add(sequence(str(n), (first, 6), 2), 0.0)
    steps = [step for _ in range(4) for step in engine.step(0.0)]
    assert [step.end for step in steps if step.error] == [SequenceEnd.RETURNED]


def test_tokens_that_the_model_rules_out_are_never_drawn() -> None:
    model = tiny("llama")
    first, second = generated("llama", (5, 6, 7), 2)
    model.generation_config.begin_suppress_tokens = [first]
    model.generation_config.suppress_tokens = [second]
    engine = GenerateEngine(GenerateModel(model), Sampler(), SequenceLimits(8, 64, CONTEXT, 512))
    answer = run(engine, [sequence("1", (5, 6, 7), 20, end=-1)])["1"]
    assert answer[0] != first
    assert second not in answer
    again = sequence("2", (5, 6, 7), 2, produced=(first,), end=-1)
    held = run(engine, [again])["2"]
    with torch.no_grad():
        logits = reference("llama")(torch.tensor([[5, 6, 7, first]])).logits[0, -1]
    logits[second] = -torch.inf
    assert held == [first, int(logits.argmax())]


class FailsInTurn(LogitsProcessor):
    """Raises in its third call, behind our draw."""

    def __init__(self) -> None:
        self._left = 2

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if not self._left:
            raise RuntimeError("out of something")
        self._left -= 1
        return scores


class Flaky(Recorded):
    """Fails in the third token of each batch of several sequences."""

    def generate(self, sequences: Sequence[Sequence[int]], *rest: Any, **options: Any) -> Any:
        if len(sequences) > 1:
            options["logits_processor"] = [*options["logits_processor"], FailsInTurn()]
        return super().generate(sequences, *rest, **options)


def test_split_batch_goes_on_behind_its_tokens() -> None:
    engine = GenerateEngine(Flaky(tiny("llama")), Sampler(), SequenceLimits(8, 64, CONTEXT, 512))
    sampling = {"temperature": 1.0, "seed": 5, "frequency_penalty": 1.0}
    sequences = [sequence(str(n), one, 12, sampling=sampling) for n, one in enumerate(prompts(4))]
    together = run(engine, sequences)
    for one in sequences:
        assert run(engine_of()[0], [one])[one.request_id] == together[one.request_id]


def test_model_that_computes_nothing_raises() -> None:
    engine = GenerateEngine(Breaking(tiny("llama")), Sampler(), SequenceLimits(8, 64, CONTEXT, 512))
    engine.add(sequence("1", (11, 6)), 0.0)
    with pytest.raises(RuntimeError, match="cannot compute this"):
        engine.step(0.0)
    assert [step.end for step in engine.abort("broken")] == [SequenceEnd.RETURNED]
    assert not engine.has_sequences()


@pytest.mark.parametrize(
    ("family", "spec", "error"),
    [
        ("llama", sequence("values", (5,), values=task_pb2.Values()), InvalidRequest),
        ("llama", sequence("audio", (5,), audio=task_pb2.Audio(pcm=b"..")), InvalidRequest),
        ("llama", sequence("unknown token", (WORDS,)), InvalidRequest),
        ("llama", sequence("long", [5] * CONTEXT), PromptTooLong),
        ("llava", sequence("picture", (5, PICTURE)), InvalidRequest),
        ("t5", sequence("long text", [5] * (POSITIONS + 1)), PromptTooLong),
    ],
    ids=lambda value: getattr(value, "request_id", ""),
)
def test_rows_it_cannot_compute_are_refused(family: str, spec: SequenceSpec, error: Any) -> None:
    engine, _ = engine_of(family)
    with pytest.raises(error):
        engine.add(spec, 0.0)
    assert not engine.has_sequences()
