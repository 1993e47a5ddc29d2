"""Schedules of a policy: when an entry is in force, over midnight and daylight saving too, and what is refused."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from pydantic import ValidationError

from sluice.settings import SettingsError, load, parse
from sluice.settings.batching import Policy

BERLIN = "Europe/Berlin"


def policy(**entry: object) -> Policy:
    given = {"from": "22:00", "to": "06:00", "wait_s": 5, **entry}
    return Policy.model_validate({"name": "window", "schedule": [given]})


def hours(scheduled: Policy, start: datetime, minutes: int = 24 * 60, step: int = 15) -> list[str]:
    """When the entry is in force, local times."""
    zone = scheduled.schedule[0].time_zone
    times = (start.astimezone(UTC) + timedelta(minutes=n) for n in range(0, minutes, step))
    return [f"{at.astimezone(zone):%a %H:%M}" for at in times if scheduled.at(at).wait_s == 5]


def test_schedule_covers_a_part_of_the_day() -> None:
    at = hours(policy(**{"from": "09:30", "to": "10:30"}), datetime(2026, 5, 4, tzinfo=UTC))
    assert at == ["Mon 09:30", "Mon 09:45", "Mon 10:00", "Mon 10:15"]


def test_schedule_crosses_midnight_from_the_days_it_names() -> None:
    entry = policy(days=["fri"], **{"from": "23:30", "to": "00:30"})
    at = hours(entry, datetime(2026, 5, 4, tzinfo=UTC), 7 * 24 * 60)
    assert at == ["Fri 23:30", "Fri 23:45", "Sat 00:00", "Sat 00:15"]


def test_schedule_covers_whole_days() -> None:
    entry = policy(days=["sat", "sun"], **{"from": "00:00", "to": "24:00"})
    assert len(hours(entry, datetime(2026, 5, 4, tzinfo=UTC), 7 * 24 * 60)) == 2 * 96


def test_schedule_reads_times_without_quotes(tmp_path: Path) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text("batcher: {policy: {schedule: [{from: 22:00, to: 06:30, wait_s: 1}]}}")
    entry = load(path).batcher.policy.schedule[0]
    assert (entry.start, entry.end) == ("22:00", "06:30")


@pytest.mark.parametrize(
    ("day", "start", "end", "times"),
    [
        # 02:00 to 03:00 is skipped.
        ((2026, 3, 29), "01:30", "03:30", ["01:30", "01:45", "03:00", "03:15"]),
        ((2026, 3, 29), "02:15", "02:45", []),
        # 02:00 to 03:00 comes twice.
        ((2026, 10, 25), "02:30", "03:00", ["02:30", "02:45"] * 2),
        ((2026, 10, 25), "01:45", "02:15", ["01:45", "02:00", "02:00"]),
    ],
)
def test_schedule_follows_the_clock_on_the_wall(
    day: tuple[int, int, int], start: str, end: str, times: list[str]
) -> None:
    entry = policy(time_zone=BERLIN, **{"from": start, "to": end})
    found = hours(entry, datetime(*day, tzinfo=ZoneInfo(BERLIN)), 8 * 60)
    assert [one[4:] for one in found] == times


def test_schedule_lets_the_last_entry_win_and_merges_classes() -> None:
    values = {
        "name": "window",
        "classes": {"bulk": {"aging_s": 30}},
        "schedule": [
            {"from": "00:00", "to": "24:00", "wait_s": 1, "max_rows": 64},
            {"from": "12:00", "to": "13:00", "wait_s": 2, "classes": {"bulk": {"wait_s": 9}}},
        ],
    }
    scheduled = Policy.model_validate(values)
    noon, night = (scheduled.at(datetime(2026, 5, 4, hour, tzinfo=UTC)) for hour in (12, 0))
    assert (noon.wait_s, noon.max_rows, noon.window_s("bulk")) == (2, 64, 9)
    assert (night.wait_s, night.max_rows, night.window_s("bulk")) == (1, 64, 1)
    assert noon.of_class("bulk").aging_s == 30


def test_schedule_may_name_another_preset() -> None:
    values = {"name": "window", "max_rows": 5, "schedule": [
        {"from": "22:00", "to": "06:00", "name": "length", "padding_max": 0.2}
    ]}  # fmt: skip
    night = Policy.model_validate(values).at(datetime(2026, 5, 4, 23, tzinfo=UTC))
    assert (night.name, night.padding_max, night.batches_running_max) == ("length", 0.2, 2)
    assert night.max_rows == 5, "the policy says so for all presets"


def test_schedule_goes_through_the_file_and_back() -> None:
    entry = {"from": "22:00", "to": "06:00", "time_zone": BERLIN, "name": "length"}
    settings = parse({"batcher": {"policy": {"name": "priority", "schedule": [entry]}}}, "f")
    import yaml

    again = parse(yaml.safe_load(settings.to_yaml()), "f")
    assert again == settings
    night = datetime(2026, 5, 4, 23, tzinfo=UTC)
    assert again.batcher.policy.at(night) == settings.batcher.policy.at(night)


@pytest.mark.parametrize(
    ("entry", "key"),
    [
        ({"from": "25:00"}, "schedule.0.from"),
        ({"to": "6:00"}, "schedule.0.to"),
        ({"to": "06:60"}, "schedule.0.to"),
        ({"to": "noon"}, "should match pattern"),
        ({"to": "22:00"}, "covers no time"),
        ({"days": []}, "schedule.0.days"),
        ({"days": ["monday"]}, "schedule.0.days.0"),
        ({"time_zone": "Berlin"}, "invalid timezone: Berlin"),
        ({"time_zone": "../etc/passwd"}, "invalid timezone: ../etc/passwd"),
        ({"wait_s": 50}, "schedule.0.wait_s"),
        ({"rows": 3}, "schedule.0.rows"),
        ({"name": "fastest"}, "schedule.0.name"),
        ({"schedule": []}, "schedule.0.schedule"),
    ],
)
def test_schedule_that_cannot_work_is_refused(entry: dict[str, object], key: str) -> None:
    given = {"from": "22:00", "to": "06:00", "wait_s": 5, **entry}
    with pytest.raises(SettingsError) as refused:
        parse({"batcher": {"policies": {"small": {"name": "window", "schedule": [given]}}}}, "f")
    assert key in str(refused.value)


def test_schedule_that_changes_nothing_is_refused() -> None:
    with pytest.raises(ValidationError, match="changes nothing"):
        Policy.model_validate({"schedule": [{"from": "22:00", "to": "06:00"}]})
