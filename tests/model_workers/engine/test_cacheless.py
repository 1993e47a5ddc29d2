import subprocess
import sys
from dataclasses import replace

import pytest

from model_workers.engine.cacheless import EchoEngine
from model_workers.engine.protocol import Sampling, SequenceEnd, TokenLogprobs
from tests.support.sequences import drive, sequence_spec


def engine(slots: int = 4) -> EchoEngine:
    return EchoEngine(slots, max_waiting=8, context_tokens=64)


def test_repeats_the_prompt_up_to_max_tokens() -> None:
    answers = drive(engine(), sequence_spec("r", [5, 6, 7], Sampling(max_tokens=7)))
    assert answers.tokens["r"] == [5, 6, 7, 5, 6, 7, 5]
    assert answers.ends["r"] is SequenceEnd.LENGTH


def test_every_step_pauses_first() -> None:
    pauses: list[None] = []
    echo = EchoEngine(4, 8, 64, lambda: pauses.append(None))
    echo.add(sequence_spec("r", [5], Sampling(max_tokens=3)), 0.0)
    for count in (1, 2, 3):
        echo.step(0.0)
        assert len(pauses) == count


@pytest.mark.parametrize(
    ("rank", "coalesce_s", "delays_s"),
    [(0, 0.0, [0, 0, 0]), (0, 0.02, [0, 0.02, 0]), (2, 0.25, [0, 0.25, 0.25]), (0, 9.0, [9, 9, 0])],
)
def test_first_token_and_urgent_end_are_not_delayed(
    rank: int, coalesce_s: float, delays_s: list[float]
) -> None:
    sequence = sequence_spec("r", [5, 6, 7], Sampling(max_tokens=5), produced=[5, 6], rank=rank)
    echo = engine()
    echo.add(replace(sequence, coalesce_s=coalesce_s), 0.0)
    assert [echo.step(0.0)[0].delay_s for _ in range(3)] == delays_s


def test_stop_tokens_of_a_template_do_not_end_an_echo() -> None:
    sampling = Sampling(max_tokens=4, stop_token_ids=frozenset({6}))
    assert len(drive(engine(), sequence_spec("r", [5, 6], sampling)).tokens["r"]) == 4


def test_abort_ends_every_row_and_leaves_a_usable_engine() -> None:
    echo = engine(slots=1)
    for name in ("a", "b"):
        echo.add(sequence_spec(name, [1]), 0.0)
    echo.step(0.0)
    ends = {step.request_id: (step.end, step.error) for step in echo.abort("it broke")}
    assert ends == {
        "a": (SequenceEnd.RETURNED, "it broke"),
        "b": (SequenceEnd.RETURNED, "it broke"),
    }
    assert drive(echo, sequence_spec("c", [1])).ends == {"c": SequenceEnd.LENGTH}


def test_logprobs_are_those_of_a_certain_answer() -> None:
    echo = engine()
    echo.add(sequence_spec("r", [4], Sampling(max_tokens=1, logprobs=True, top_logprobs=2)), 0.0)
    assert echo.step(0.0)[0].logprobs == (TokenLogprobs(0.0, ((4, 0.0),)),)


def test_no_torch_is_imported() -> None:
    code = "import sys, model_workers.engine.cacheless, model_workers.worker; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
