import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.core.retry import FailureKind, ItemRetryPolicy, failure_kind
from sluice import errors
from sluice.v1.jobs_pb2 import JobRetries


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.Overloaded("x", retry_after_s=1.0), FailureKind.NO_CAPACITY),
        (errors.ModelUnavailable("x", retry_after_s=1.0), FailureKind.NO_CAPACITY),
        (errors.ShuttingDown("x"), FailureKind.NO_CAPACITY),
        (errors.SlowReader("x"), FailureKind.TRANSIENT),
        (errors.EngineFailed("x"), FailureKind.TRANSIENT),
        (errors.DeadlinePassed("x"), FailureKind.TRANSIENT),
        (errors.PromptTooLong("x"), FailureKind.PERMANENT),
        (errors.UnknownModel("x"), FailureKind.PERMANENT),
        (errors.SafetyBlocked("x"), FailureKind.PERMANENT),
    ],
)
def test_the_code_of_an_error_tells_what_becomes_of_its_item(
    error: errors.SluiceError, kind: FailureKind
) -> None:
    assert failure_kind(error) is kind


@given(st.integers(1, 2000), st.floats(0, 1, exclude_max=True))
def test_waits_double_are_spread_and_stay_under_the_longest(failures: int, dice: float) -> None:
    policy = ItemRetryPolicy(first_wait_s=0.5, wait_s_max=20.0)
    step = min(20.0, 0.5 * 2.0 ** min(failures - 1, 60))

    assert step / 2 <= policy.wait_s(failures, dice) <= step


def test_a_job_says_how_often() -> None:
    assert ItemRetryPolicy.of(JobRetries()) == ItemRetryPolicy()
    assert ItemRetryPolicy.of(JobRetries(max_retries=0)).retries == 0
