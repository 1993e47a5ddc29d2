"""Schedules of a batching policy: overrides that are in force at times of the day.

    schedule:
      - {from: "22:00", to: "06:00", days: [mon, tue, wed, thu, fri], time_zone: Europe/Berlin, wait_s: 1, max_rows: 64}

An entry is in force while the clock on the wall of its time zone shows a time from `from` to before `to`. So it
needs no rule for daylight saving: an hour that a clock skips is skipped, and one that it shows twice counts twice.
Times have whole minutes, as the offsets of time zones do: an entry starts and ends with a minute of UTC.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final, Literal, Self
from zoneinfo import ZoneInfo

from pydantic import ConfigDict, Field, model_serializer, model_validator

from sluice.settings.base import Section

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: Final[tuple[Day, ...]] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MINUTES: Final = 24 * 60
TimeOfDay = Annotated[str, Field(pattern="^([01][0-9]|2[0-3]):[0-5][0-9]$|^24:00$")]


class ScheduleEntry(Section):
    """Overrides of a policy, and when they are in force. Keys beside the declared ones are the overrides."""

    model_config = ConfigDict(extra="allow", frozen=True)

    start: TimeOfDay = Field(alias="from")
    """First minute, "HH:MM"."""
    end: TimeOfDay = Field(alias="to")
    """The minute after the last, "HH:MM", at most "24:00". Before `from`: on the next day."""
    days: tuple[Day, ...] = Field(DAYS, min_length=1)
    """Days on which it starts."""
    time_zone: ZoneInfo = ZoneInfo("UTC")
    """IANA name of the time zone, such as Europe/Berlin."""

    @property
    def overrides(self) -> Mapping[str, Any]:
        """Keys of the policy that it replaces."""
        return self.__pydantic_extra__ or {}

    def covers(self, moment: datetime) -> bool:
        """Return whether the entry is in force at a moment, which has a time zone."""
        local = moment.astimezone(self.time_zone)
        minute, day = 60 * local.hour + local.minute, local.weekday()
        start, end = _minutes(self.start), _minutes(self.end)
        if start < end:
            return start <= minute < end and DAYS[day] in self.days
        if minute >= start:
            return DAYS[day] in self.days
        return minute < end and DAYS[day - 1] in self.days

    @model_validator(mode="after")
    def _check_interval(self) -> Self:
        if _minutes(self.start) % DAY_MINUTES == _minutes(self.end) % DAY_MINUTES and not (
            self.start == "00:00" and self.end == "24:00"
        ):
            raise ValueError(
                f"from {self.start} to {self.end}: covers no time; for a whole day write 00:00 to 24:00"
            )
        if not self.overrides:
            raise ValueError(
                "changes nothing; name the keys of the policy that differ, such as wait_s"
            )
        return self

    @model_serializer
    def _as_written(self) -> dict[str, Any]:
        own = {
            "from": self.start,
            "to": self.end,
            "days": list(self.days),
            "time_zone": str(self.time_zone),
        }
        return {**own, **self.overrides}


def _minutes(time: str) -> int:
    """Return the minutes since midnight of "HH:MM"."""
    hours, minutes = time.split(":")
    return 60 * int(hours) + int(minutes)
