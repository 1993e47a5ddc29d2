"""Subjects have the stable names, and no name can break out of its place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.settings import NatsSettings
from sluice.wire import jetstream, subjects


def test_the_names_are_stable() -> None:
    assert subjects.tasks("small", "bulk") == "sluice.tasks.small.bulk"
    assert subjects.frames("gw-1") == "sluice.frames.gw-1"
    assert subjects.held("gw-1") == "sluice.held.gw-1"
    assert subjects.dead_letters("small", "bulk") == "sluice.dead_letters.small.bulk"


@given(st.text(max_size=70))
def test_a_token_never_holds_a_wildcard_a_dot_or_a_space(name: str) -> None:
    if subjects.is_token(name):
        assert not set(name) & set(".*> \t\r\n")
        assert 1 <= len(name) <= 64


@pytest.mark.parametrize("name", ["", "a.b", "a>", "*", "a b", "ä", "x" * 65])
def test_a_bad_token_is_our_mistake(name: str) -> None:
    with pytest.raises(AssertionError):
        subjects.frames(name)


def test_every_task_subject_is_in_the_stream_and_has_its_consumer() -> None:
    prefix = jetstream.tasks_stream(NatsSettings()).subjects
    assert prefix == [f"{subjects.TASKS}.>"]
    for name in subjects.CLASSES:
        config = jetstream.tasks_consumer("small", name, max_ack_pending=8)
        assert config.filter_subject == subjects.tasks("small", name)
        assert config.max_ack_pending == 8


def test_progress_is_said_well_within_the_ack_wait() -> None:
    assert jetstream.ACK_PROGRESS_S * 2 < jetstream.ACK_WAIT_S
