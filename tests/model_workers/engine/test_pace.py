from model_workers.engine.pace import BULK_RANK, URGENT_S, BulkPace

TOKEN_S = 0.001


def measured(step_s: float = 0.0045) -> tuple[BulkPace, float]:
    """A pace that has seen 20 steps without prompts and 20 with 100 tokens of them, and the time after them."""
    pace, now = BulkPace(), 0.0
    for tokens in (*[0] * 20, *[100] * 20):
        pace.begin(tokens, now)
        now += step_s + tokens * TOKEN_S
    pace.begin(0, now)
    return pace, now


def test_bulk_prompts_keep_steps_short_beside_urgent_ones() -> None:
    pace = BulkPace(token_s=0.001, step_s=0.006)
    assert pace.limit(BULK_RANK, 0.0) == 0, "no sequence of a more urgent class came"
    assert pace.limit(0, 0.0) == 6
    assert pace.limit(BULK_RANK, URGENT_S) == 6
    assert pace.limit(BULK_RANK, URGENT_S + 0.1) == 0


def test_bulk_prompts_may_add_half_of_a_long_step() -> None:
    assert BulkPace(token_s=0.001, step_s=0.01).limit(0, 0.0) == 5
    assert BulkPace(token_s=0.001, step_s=0.1).limit(0, 0.0) == 50


def test_the_costs_of_a_token_and_of_a_step_are_measured() -> None:
    pace, now = measured(step_s=0.0055)
    assert 6 <= pace.limit(0, now) <= 7
    pace, now = measured(step_s=0.1)
    assert 49 <= pace.limit(0, now) <= 50


def test_nothing_is_limited_before_the_cost_of_a_token_is_known() -> None:
    pace = BulkPace()
    assert pace.limit(0, 0.0) == 0
    pace.begin(100, 0.0)
    pace.begin(100, 1.0)
    assert pace.limit(0, 1.0) == 0, "the cost of a step without prompts is not known"


def test_a_pause_is_no_step() -> None:
    pace, now = measured()
    before = pace.limit(0, now)
    pace.begin(100, now)
    pace.pause()
    pace.begin(100, now + 60.0)
    assert pace.limit(0, now + 60.0) == before


def test_a_step_computes_one_token_at_least() -> None:
    assert BulkPace(token_s=1.0).limit(0, 0.0) == 1
