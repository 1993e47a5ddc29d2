"""Whisper: what transformers generates from audio alone, the engine says among other sequences."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gateway.config.models import ModelFolder
from model_workers.engine.encoder_decoder import EncoderDecoderEngine
from model_workers.engine.families import load_encoder_decoder
from model_workers.engine.protocol import (
    Sampling,
    SequenceSpec,
)
from model_workers.engine.sampling.sampler import Sampler
from model_workers.engine.sequences import SequenceLimits
from model_workers.engine.speech import SpeechModel
from sluice.errors import InvalidRequest
from sluice.internal.v1 import task_pb2
from sluice.settings import ModelSettings, SettingsError
from sluice.settings.models import SideLimits
from tests.model_workers.engine.test_encoder_decoder import run
from tests.support.sounds import sound
from tests.support.tiny_seq2seq import save_seq2seq
from tests.support.tiny_whisper import (
    CHUNK_S,
    END,
    LANGUAGES,
    NO_TIMESTAMPS,
    POSITIONS,
    PREVIOUS,
    START,
    TASKS,
    extractor,
    save_whisper,
    tiny_whisper,
)

LIMITS = SequenceLimits(slots=6, max_waiting=64, context_tokens=POSITIONS, prefill_tokens=64)
SIDES = SideLimits(POSITIONS - 1, POSITIONS, POSITIONS)
SOUNDS = [sound(seconds, seed) for seed, seconds in enumerate((2.0, 0.3, 1.2, 0.7, 1.9, 0.05))]
OPENING = (TASKS["transcribe"], NO_TIMESTAMPS)


def engine_of(**generation: Any) -> EncoderDecoderEngine:
    model = SpeechModel(tiny_whisper(**generation), extractor())
    return EncoderDecoderEngine(model, Sampler(), LIMITS, SIDES)


def begin(language: str = "en", task: str = "transcribe") -> tuple[int, ...]:
    return (START, LANGUAGES[f"<|{language}|>"], TASKS[task], NO_TIMESTAMPS)


def sequence(name: str, pcm: bytes, tokens: int = 20, **fields: Any) -> SequenceSpec:
    sampling = Sampling(tokens, stop_token_ids=frozenset({END}), **fields.pop("sampling", {}))
    given = {"attempt": 0, "produced": (), "prompt": begin(), **fields}
    audio = task_pb2.Audio(pcm=pcm, opening_token_ids=given.pop("opening", ()))
    return SequenceSpec(name, "b", sampling=sampling, audio=audio, **given)


@cache
def reference() -> Any:
    """transformers' model."""
    return tiny_whisper()


@cache
def generated(pcm: bytes, tokens: int, **asked: Any) -> list[int]:
    """What transformers' own loop says behind the tokens that it begins with."""
    wave = np.frombuffer(pcm, "<i2").astype(np.float32) / 32768
    features = extractor()(wave, sampling_rate=16_000, return_tensors="pt").input_features
    before = torch.tensor([PREVIOUS, *asked.pop("before")]) if "before" in asked else None
    found = reference().generate(
        features, max_new_tokens=tokens, do_sample=False, num_beams=1, prompt_ids=before,
        return_dict_in_generate=True, **{"task": "transcribe", **asked},
    )  # fmt: skip
    sequence: list[int] = found.sequences[0].tolist()
    return sequence[sequence.index(START) + 4 :] if NO_TIMESTAMPS in sequence else sequence


@pytest.mark.parametrize("language", ["en", "de"])
@pytest.mark.parametrize("task", TASKS)
def test_greedy_answers_are_those_of_generate(language: str, task: str) -> None:
    prompt = begin(language, task)
    sequences = [sequence(str(n), pcm, 4 + 4 * n, prompt=prompt) for n, pcm in enumerate(SOUNDS)]
    answers = run(engine_of(), sequences)
    for n, pcm in enumerate(SOUNDS):
        assert answers[str(n)] == generated(pcm, 4 + 4 * n, language=language, task=task)
    assert len({tuple(answer[:4]) for answer in answers.values()}) > 3, "the model hears something"


def test_the_language_is_found_as_generate_finds_it() -> None:
    unknown = {"prompt": (START,), "opening": OPENING}
    answers = run(
        engine_of(), [sequence(str(n), pcm, 12, **unknown) for n, pcm in enumerate(SOUNDS)]
    )
    for n, pcm in enumerate(SOUNDS):
        language, *opening = answers[str(n)][:3]
        assert language in LANGUAGES.values()
        assert tuple(opening) == OPENING
        name = next(name for name, token in LANGUAGES.items() if token == language)
        assert answers[str(n)][3:] == generated(pcm, 9, language=name)
        assert answers[str(n)][3:] == generated(pcm, 9)


def test_the_text_before_the_audio_is_read_as_generate_reads_it() -> None:
    before = (5, 6, 7, 8)
    spec = sequence("1", SOUNDS[0], 10, prompt=(PREVIOUS, *before, *begin()))
    others = [sequence(str(n), pcm) for n, pcm in enumerate(SOUNDS[1:], 2)]
    expected = generated(SOUNDS[0], 10, language="en", before=before)
    assert run(engine_of(), [spec, *others])["1"] == expected
    assert expected != generated(SOUNDS[0], 10, language="en")


@pytest.mark.parametrize("opening", [(), OPENING], ids=["known language", "language found"])
def test_a_row_goes_on_behind_the_tokens_of_an_earlier_attempt(opening: Sequence[int]) -> None:
    asked = {"prompt": (START,), "opening": opening} if opening else {}
    whole = run(engine_of(), [sequence("1", SOUNDS[0], 12, **asked)])["1"]
    others = [sequence(str(n), pcm) for n, pcm in enumerate(SOUNDS[1:], 2)]
    engine = engine_of()
    for held in range(1, len(whole)):
        again = sequence("1", SOUNDS[0], 12, produced=tuple(whole[:held]), attempt=1, **asked)
        assert run(engine, [again, *others[:2]])["1"] == whole


def test_tokens_that_the_folder_rules_out_are_never_said() -> None:
    said = run(engine_of(), [sequence(str(n), pcm, 30) for n, pcm in enumerate(SOUNDS)])
    free = engine_of(suppress_tokens=None, begin_suppress_tokens=None)
    other = run(free, [sequence(str(n), pcm, 30) for n, pcm in enumerate(SOUNDS)])
    never = {7, *TASKS.values(), PREVIOUS, START, NO_TIMESTAMPS}
    assert all(not never.intersection(answer) for answer in said.values())
    assert all(answer[0] not in (3, END) for answer in said.values())
    assert said != other


def test_many_rows_are_heard_a_few_at_a_time_while_others_go_on() -> None:
    limits = SequenceLimits(slots=32, max_waiting=64, context_tokens=POSITIONS, prefill_tokens=512)
    model = SpeechModel(tiny_whisper(), extractor())
    engine = EncoderDecoderEngine(model, Sampler(), limits, SIDES)
    for number in range(20):
        engine.add(sequence(str(number), SOUNDS[number % 6], 30), 0.0)
    steps = [{step.request_id for step in engine.step(0.0)} for _ in range(3)]
    assert [len(ids) for ids in steps] == [8, 16, 20]
    assert steps[0] < steps[1] < steps[2]


@pytest.mark.parametrize(
    "spec",
    [
        SequenceSpec("no audio", "b", 0, begin(), (), Sampling(5)),
        sequence("long", sound(CHUNK_S + 0.1)),
    ],
    ids=lambda spec: spec.request_id,
)
def test_rows_that_the_model_cannot_hear_are_refused(spec: SequenceSpec) -> None:
    with pytest.raises(InvalidRequest):
        engine_of().add(spec, 0.0)


def test_languages_are_found_only_where_the_folder_names_them() -> None:
    with pytest.raises(InvalidRequest, match="lang_to_id"):
        engine_of(lang_to_id=None).add(sequence("1", SOUNDS[1], opening=OPENING), 0.0)


def test_worker_and_gateway_agree_about_a_folder(tmp_path: Path) -> None:
    settings = ModelSettings(name="m", path=str(save_whisper(tmp_path)), device="cpu")
    tokenizer, speech = ModelFolder(settings).tokenizer, ModelFolder(settings).tokenizer.speech
    assert speech is not None
    engine = load_encoder_decoder(settings)
    assert engine is not None
    assert tokenizer.context_tokens == engine._scheduler.limits.context_tokens == POSITIONS
    assert tokenizer.stop_token_ids == {END}
    assert speech.chunk_s == CHUNK_S
    assert speech.begin("en", translate=False, before=()) == (list(begin()), [])
    assert speech.begin("", translate=True, before=[5, 6]) == (
        [PREVIOUS, 5, 6, START],
        [TASKS["translate"], NO_TIMESTAMPS],
    )
    assert run(engine, [sequence("1", SOUNDS[0], 9)])["1"] == generated(SOUNDS[0], 9, language="en")
    assert tokenizer.bare(" w5 w6") == [5, 6]
    assert tokenizer.tokenizer.decode([*begin(), 5, 6, END]) == " w5 w6"


def test_features_of_another_kind_are_one_clear_line(tmp_path: Path) -> None:
    settings = ModelSettings(name="m", path=str(save_whisper(tmp_path)), device="cpu")
    file = tmp_path / "preprocessor_config.json"
    file.write_text(file.read_text().replace('"feature_size": 16', '"feature_size": 80'))
    with pytest.raises(SettingsError, match=r"preprocessor_config.json: .*the model takes \(16, "):
        load_encoder_decoder(settings)


def test_a_model_that_reads_takes_no_audio(tmp_path: Path) -> None:
    settings = ModelSettings(name="m", path=str(save_seq2seq(tmp_path, "bart")), device="cpu")
    assert ModelFolder(settings).tokenizer.speech is None
    with pytest.raises(InvalidRequest, match="no audio"):
        load_encoder_decoder(settings).add(sequence("1", SOUNDS[0], prompt=(5, 6)), 0.0)
