"""Attempts until something is there."""

import pytest

from sluice.wire.patience import patiently


class Attempts:
    """Raises the errors one after the other, then returns how many there were."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.made = 0

    async def __call__(self) -> int:
        self.made += 1
        if self._errors:
            raise self._errors.pop(0)
        return self.made


async def test_attempts_are_made_until_one_succeeds() -> None:
    attempts = Attempts(ConnectionError(), TimeoutError())
    made = await patiently(attempts, (ConnectionError, TimeoutError), bound_s=60, wait_s=0)
    assert made == 3


async def test_another_error_is_raised_at_once() -> None:
    attempts = Attempts(ConnectionError(), ValueError("wrong"))
    with pytest.raises(ValueError, match="wrong"):
        await patiently(attempts, (ConnectionError,), bound_s=60, wait_s=0)
    assert attempts.made == 2


async def test_the_last_error_is_raised_at_the_bound() -> None:
    attempts = Attempts(ConnectionError("first"))
    with pytest.raises(ConnectionError, match="first"):
        await patiently(attempts, (ConnectionError,), bound_s=1, wait_s=2)
    assert attempts.made == 1
