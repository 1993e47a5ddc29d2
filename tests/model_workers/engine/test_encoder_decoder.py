"""Encoder-decoders: what transformers generates from a text alone, the engine says among others."""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gateway.config.models import ModelFolder
from model_workers.engine.encoder_decoder import EncoderDecoder, EncoderDecoderEngine
from model_workers.engine.families import load_encoder_decoder
from model_workers.engine.protocol import (
    Sampling,
    SequenceEnd,
    SequenceSpec,
)
from model_workers.engine.sampling.sampler import Sampler
from model_workers.engine.sequences import SequenceLimits
from sluice.errors import InvalidRequest, PromptTooLong
from sluice.settings import ModelSettings, SettingsError
from sluice.settings.models import SideLimits
from tests.support.tiny_models import save_model
from tests.support.tiny_seq2seq import (
    END,
    FAMILIES,
    POSITIONS,
    VOCABULARY,
    save_seq2seq,
    tiny_seq2seq,
)

LIMITS = SequenceLimits(slots=6, max_waiting=64, context_tokens=2 * POSITIONS, prefill_tokens=64)
SIDES = SideLimits(POSITIONS, POSITIONS, 2 * POSITIONS)


def engine_of(family: str, limits: SequenceLimits = LIMITS) -> EncoderDecoderEngine:
    return EncoderDecoderEngine(EncoderDecoder(tiny_seq2seq(family)), Sampler(), limits, SIDES)


def sequence(name: str, prompt: Sequence[int], tokens: int = 12, **fields: Any) -> SequenceSpec:
    sampling = Sampling(tokens, stop_token_ids=frozenset({END}), **fields.pop("sampling", {}))
    given = {"attempt": 0, "produced": (), **fields}
    return SequenceSpec(name, "b", prompt=tuple(prompt), sampling=sampling, **given)


def run(
    engine: EncoderDecoderEngine, sequences: Sequence[SequenceSpec], seed: int = 0
) -> dict[str, Any]:
    """The answers, when the sequences come at random times; and how each ended."""
    draw, left = random.Random(seed), list(sequences)
    answers: dict[str, list[int]] = {one.request_id: list(one.produced) for one in sequences}
    ends = {}
    while left or engine.has_sequences():
        for _ in range(draw.randrange(3)):
            if left:
                engine.add(left.pop(), 0.0)
        for step in engine.step(0.0):
            assert step.start_index == len(answers[step.request_id])
            answers[step.request_id] += step.token_ids
            if step.end is not None:
                ends[step.request_id] = step.end
    assert ends.keys() == answers.keys()
    return answers


def prompts(count: int = 12, seed: int = 1) -> list[list[int]]:
    draw = random.Random(seed)
    return [
        [*(draw.randrange(2, VOCABULARY) for _ in range(draw.randrange(1, 40))), END]
        for _ in range(count)
    ]


@cache
def reference(family: str) -> Any:
    """transformers' model."""
    return tiny_seq2seq(family)


@cache
def generated(family: str, prompt: tuple[int, ...], tokens: int) -> list[int]:
    """What transformers' own loop says."""
    model = reference(family)
    before = 1 if model.generation_config.forced_bos_token_id is None else 2
    found = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=tokens + before - 1,
        do_sample=False,
        num_beams=1,
        forced_eos_token_id=None,
    )
    answer: list[int] = found[0].tolist()[before:]
    return answer


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_generate(family: str) -> None:
    sequences = [sequence(str(n), one, 3 + 2 * n) for n, one in enumerate(prompts(9))]
    answers = run(engine_of(family), sequences)
    for one in sequences:
        expected = generated(family, one.prompt, one.sampling.max_tokens)
        assert answers[one.request_id] == expected
    assert len({tuple(answer) for answer in answers.values()}) > 5, "the models say something"


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_row_goes_on_behind_the_tokens_of_an_earlier_attempt(family: str) -> None:
    (prompt, *others) = prompts()
    whole = generated(family, tuple(prompt), 20)
    sequences = [sequence(str(n), one) for n, one in enumerate(others)]
    engine = engine_of(family)
    for held in range(1, len(whole), 3):
        again = sequence("again", prompt, 20, produced=tuple(whole[:held]), attempt=1)
        assert run(engine, [again, *sequences[:3]])["again"] == whole


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_row_that_made_room_for_an_urgent_one_says_the_same(family: str) -> None:
    few = SequenceLimits(slots=2, max_waiting=64, context_tokens=2 * POSITIONS, prefill_tokens=64)
    engine = engine_of(family, few)
    sequences = [sequence(str(n), one, 20, rank=2) for n, one in enumerate(prompts(4))]
    answers: dict[str, list[int]] = {}
    for one in sequences:
        engine.add(one, 0.0)
    for step in engine.step(0.0) + engine.step(0.0):
        answers.setdefault(step.request_id, []).extend(step.token_ids)
    for number in range(6):
        engine.add(sequence(f"urgent {number}", [7, 8, END], 2), 0.0)
        for step in engine.step(0.0) + engine.step(0.0):
            answers.setdefault(step.request_id, []).extend(step.token_ids)
    assert engine._scheduler.preemptions
    while engine.has_sequences():
        for step in engine.step(0.0):
            answers.setdefault(step.request_id, []).extend(step.token_ids)
    for one in sequences:
        assert answers[one.request_id] == generated(family, one.prompt, 20)


def test_rows_end_when_nobody_waits_or_their_time_is_over() -> None:
    engine = engine_of("bart")
    first, second, third = prompts(3)
    engine.add(sequence("gone", first, 30), 0.0)
    engine.add(sequence("late", second, 30, deadline=5.0), 0.0)
    engine.add(sequence("stays", third, 30), 0.0)
    engine.step(0.0)
    engine.cancel(["gone"])
    ends = {step.request_id: step.end for step in engine.step(6.0) if step.end is not None}
    assert ends == {"gone": SequenceEnd.CANCELLED, "late": SequenceEnd.DEADLINE}
    said = [token for _ in range(60) for step in engine.step(6.0) for token in step.token_ids]
    assert said == generated("bart", tuple(third), 30)[2:]


def test_what_breaks_ends_all_rows_and_the_engine_lives() -> None:
    engine = engine_of("t5")
    sequences = [sequence(str(n), one) for n, one in enumerate(prompts(3))]
    for one in sequences:
        engine.add(one, 0.0)
    engine.step(0.0)
    assert {step.end for step in engine.abort("broken")} == {SequenceEnd.RETURNED}
    assert run(engine, sequences)["1"] == generated("t5", sequences[1].prompt, 12)


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (sequence("long", [5] * (POSITIONS + 1)), PromptTooLong),
        (sequence("unknown token", [VOCABULARY]), InvalidRequest),
    ],
    ids=lambda value: getattr(value, "request_id", ""),
)
def test_rows_that_the_model_cannot_take_are_refused(
    spec: SequenceSpec, error: type[Exception]
) -> None:
    with pytest.raises(error):
        engine_of("bart").add(spec, 0.0)


def test_an_answer_ends_where_the_decoder_has_no_more_positions() -> None:
    engine = EncoderDecoderEngine(
        EncoderDecoder(tiny_seq2seq("bart")), Sampler(), LIMITS, SideLimits(POSITIONS, 10, 128)
    )
    spec = SequenceSpec("1", "b", 0, (7, END), (), Sampling(50))
    assert len(run(engine, [spec])["1"]) == 8  # two tokens begin every answer


@pytest.mark.parametrize(("family", "context"), [("bart", None), ("t5", None), ("mt5", 90)])
def test_worker_and_gateway_agree_about_a_folder(
    tmp_path: Path, family: str, context: int | None
) -> None:
    folder = save_seq2seq(tmp_path, family)
    settings = ModelSettings(name="m", path=str(folder), device="cpu", context_tokens=context)
    tokenizer = ModelFolder(settings).tokenizer
    engine = load_encoder_decoder(settings)
    assert engine is not None
    assert tokenizer.context_tokens == engine._scheduler.limits.context_tokens
    prompt = tokenizer.encode_text("w7 w8 w9")
    assert prompt == [7, 8, 9, END]
    answer = run(engine, [sequence("1", prompt, 9)])["1"]
    assert answer == generated(family, tuple(prompt), 9)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mt5", {}, "context_tokens"),
        ("bart", {"quantization": "int8"}, "quantization"),
        ("bart", {"tensor_parallel": 2}, "tensor_parallel"),
    ],
)
def test_settings_that_do_not_fit_are_one_clear_line(
    tmp_path: Path, family: str, changes: dict[str, Any], words: str
) -> None:
    folder = save_seq2seq(tmp_path, family)
    with pytest.raises(SettingsError, match=words) as raised:
        load_encoder_decoder(ModelSettings(name="m", path=str(folder), device="cpu", **changes))
    assert "\n" not in str(raised.value)


def test_another_family_is_named_with_those_that_are_served(tmp_path: Path) -> None:
    folder = save_seq2seq(tmp_path, "bart")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"bart"', '"blenderbot"'))
    with pytest.raises(SettingsError, match=r"blenderbot is not served, only t5, "):
        load_encoder_decoder(ModelSettings(name="m", path=str(folder), device="cpu"))


def test_a_decoder_alone_has_the_other_engine(tmp_path: Path) -> None:
    settings = ModelSettings(name="m", path=str(save_model(tmp_path)), device="cpu", cache_gb=0.01)
    assert load_encoder_decoder(settings) is None
