from model_workers.engine.pace import BULK_RANK, URGENT_S, BulkPace

STEP_S = 0.01
TOKEN_S = 0.001


def measured() -> tuple[BulkPace, float]:
    """A pace that has seen 20 steps without prompts and 20 with 100 tokens of them, and the time after them."""
    pace, now = BulkPace(), 0.0
    for tokens in (*[0] * 20, *[100] * 20):
        pace.begin(tokens, now)
        now += STEP_S + tokens * TOKEN_S
    pace.begin(0, now)
    return pace, now


def test_bulk_prompts_may_add_20_ms_to_a_step_while_urgent_rows_come() -> None:
    pace, now = measured()
    assert pace.limit(BULK_RANK, now) == 0, "no row of a more urgent class came"
    assert 19 <= pace.limit(0, now) <= 20
    assert 19 <= pace.limit(BULK_RANK, now + URGENT_S) <= 20
    assert pace.limit(BULK_RANK, now + URGENT_S + 0.1) == 0


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
