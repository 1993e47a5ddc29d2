"""The policy of a model at a moment, and what the log says of it."""

import logging
from datetime import UTC, datetime
from typing import Any

import pytest

from batcher.active_policy import ActivePolicy
from sluice.settings import BatcherSettings, Settings, TenantSettings
from tests.batcher.batchers import ECHO, settings_of

DAY, NIGHT = (datetime(2026, 5, 4, hour, tzinfo=UTC) for hour in (12, 23))
NIGHTLY = {"name": "window", "schedule": [{"from": "22:00", "to": "06:00", "max_rows": 64}]}


def settings(policy: Any, **values: Any) -> Settings:
    batcher = BatcherSettings.model_validate({"policy": policy})
    made = settings_of("nats://127.0.0.1:1", "127.0.0.1:2", ECHO, batcher)
    return made.model_copy(update=values)


@pytest.fixture(autouse=True)
def _all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_policy_follows_its_schedule(caplog: pytest.LogCaptureFixture) -> None:
    policy = ActivePolicy(ECHO, settings(NIGHTLY), DAY)
    assert policy.policy.max_rows == 32
    assert not policy.follow(DAY)
    assert policy.follow(NIGHT)
    assert (policy.policy.max_rows, policy.policy.schedule) == (64, ())
    assert "activated scheduled policy window for model echo (" in caplog.text
    assert "max_rows 64" in caplog.text
    assert policy.follow(DAY)
    assert policy.policy.max_rows == 32


def test_policy_of_a_reload_is_the_one_of_the_moment() -> None:
    policy = ActivePolicy(ECHO, settings("continuous"), NIGHT)
    policy.change(settings(NIGHTLY, tenants={"a": TenantSettings(weight=3.0)}), NIGHT)
    assert (policy.policy.max_rows, policy.weights) == (64, {"a": 3.0})


def test_policy_that_gains_nothing_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    note = "policy length for model echo: no gain, engine echo pads nothing"
    policy = ActivePolicy(ECHO, settings("length"), DAY)
    assert not caplog.messages
    policy.log_notes()
    policy.change(settings("length"), DAY)
    assert caplog.messages == [note]
    policy.change(settings({"name": "length", "wait_s": 1.0}), DAY)
    assert caplog.messages == [note] * 2
