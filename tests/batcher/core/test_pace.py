from batcher.core.pace import Pace
from sluice.internal.v1.worker_pb2 import WorkerLoad


def load(steps: int, waiting_tokens: int = 0, running: int = 4) -> WorkerLoad:
    return WorkerLoad(slots=8, running=running, steps=steps, waiting_tokens=waiting_tokens)


def test_the_time_of_a_step_is_learned_from_reports_that_follow_one_another() -> None:
    pace = Pace()
    for number in range(10):
        pace.note(load(steps=2 * number), now=0.1 * number)
    assert abs(pace.step_s - 0.05) < 1e-9
    assert pace.prefill_token_s == 0


def test_an_idle_worker_teaches_nothing() -> None:
    pace = Pace()
    pace.note(load(0, running=0), 0.0)
    pace.note(load(1, running=4), 100.0)
    assert pace.step_s == 0


def test_prompt_tokens_cost_what_a_step_with_them_takes_longer() -> None:
    pace = Pace()
    pace.note(load(0), 0.0)
    pace.note(load(1), 0.05)
    pace.note(load(2, waiting_tokens=100), 0.1)
    pace.note(load(3), 0.25)
    assert abs(pace.prefill_token_s - 0.001) < 1e-9
    assert abs(pace.step_s - 0.05) < 1e-9
