"""Bounds of the fields of a job. The gateway that answers an item checks its content."""

import math
from collections.abc import Iterable
from operator import attrgetter
from typing import Final

from google.protobuf.duration_pb2 import Duration

from sluice import defaults
from sluice.errors import InvalidRequest
from sluice.v1 import jobs_pb2 as pb
from sluice.v1.inference_pb2 import Priority
from sluice.wire.clock import ms_of, unix_ms

NAME_CHARS_MAX: Final = 128
RETRIES_MAX: Final = 100
REUSED_JOBS_MAX: Final = 100
"""Jobs whose answers one job may reuse; all results of each are read."""
STAGES_MAX: Final = 16
DURATION_S_MAX: Final = 24 * 3600.0
"""Longest backoff, time of an item and idle time of an input from NATS, in seconds."""
DEADLINE_S_MAX: Final = 366 * 24 * 3600.0
"""How far ahead a deadline may lie, in seconds: a year."""
EXPIRY_S_MAX: Final = 366 * 24 * 3600.0
"""Longest time for which results or an upload may be kept, in seconds."""
REASONS_MAX: Final = 64
PAGE_TOKEN_CHARS_MAX: Final = 128
_CHARS_MAX: Final = {
    "name": NAME_CHARS_MAX,
    "input.url": 2048,
    "input.nats_subject": 256,
    "input.id_field": NAME_CHARS_MAX,
    "webhook.url": 2048,
    "webhook.secret": 256,
}
"""Characters of fields of a specification."""
_ENTRIES_MAX: Final = {
    "stages": STAGES_MAX,
    "dedupe.reuse_job_ids": REUSED_JOBS_MAX,
    "labels": defaults.LABELS_MAX,
}


def check_spec(spec: pb.JobSpec) -> None:
    """Raise InvalidRequest, naming the field, if a field other than `limits` is out of bounds."""
    for field, limit in _CHARS_MAX.items():
        check_length(f"spec.{field}", attrgetter(field)(spec), limit)
    for number, stage in enumerate(spec.stages):
        check_length(f"spec.stages[{number}].name", stage.name, NAME_CHARS_MAX)
    for field, limit in _ENTRIES_MAX.items():
        check_count(f"spec.{field}", attrgetter(field)(spec), limit)
    key_max, value_max = defaults.LABEL_KEY_CHARS_MAX, defaults.LABEL_VALUE_CHARS_MAX
    for key, value in spec.labels.items():
        if not 1 <= len(key) <= key_max or len(value) > value_max:
            message = f"keys must have 1 to {key_max} characters, values at most {value_max}"
            raise InvalidRequest.of(f"spec.labels.{key}", message)
    if (size := defaults.labels_bytes(spec.labels)) > defaults.LABELS_BYTES_MAX:
        message = f"have {size} bytes; send at most {defaults.LABELS_BYTES_MAX} in keys and values together"
        raise InvalidRequest.of("spec.labels", message)
    if spec.priority not in Priority.values():
        raise InvalidRequest.of("spec.priority", "is not a known priority")
    if spec.input.format not in pb.JobInputFormat.values():
        raise InvalidRequest.of("spec.input.format", "is not a known format")
    if spec.retries.max_retries > RETRIES_MAX:
        raise InvalidRequest.of("spec.retries.max_retries", f"must be at most {RETRIES_MAX}")
    for field in ("input.nats_idle", "retries.initial_backoff", "retries.max_backoff"):
        check_duration(f"spec.{field}", attrgetter(field)(spec), DURATION_S_MAX)
    check_duration("spec.results_expire_after", spec.results_expire_after)


def check_duration(field: str, duration: Duration, seconds_max: float = EXPIRY_S_MAX) -> None:
    """Raise InvalidRequest unless a duration, if set, is from 0 to `seconds_max`."""
    if not 0 <= ms_of(duration) <= seconds_max * 1000:
        raise InvalidRequest.of(field, f"must be 0 to {seconds_max:g} s")


def check_limits(limits: pb.JobLimits) -> None:
    """Raise InvalidRequest, naming the field, if a limit is out of bounds."""
    if limits.HasField("max_bad_line_share") and not 0 <= limits.max_bad_line_share <= 1:
        raise InvalidRequest.of("limits.max_bad_line_share", "must be in [0, 1]")
    if not 0 <= limits.max_cost < math.inf:  # NaN too
        raise InvalidRequest.of("limits.max_cost", "must be a number that is not negative")
    check_duration("limits.item_timeout", limits.item_timeout, DURATION_S_MAX)
    if ms_of(limits.deadline_time) > unix_ms() + DEADLINE_S_MAX * 1000:
        raise InvalidRequest.of("limits.deadline_time", "is more than a year ahead")


def check_not_late(limits: pb.JobLimits) -> None:
    """Raise InvalidRequest if the deadline has passed."""
    if limits.HasField("deadline_time") and ms_of(limits.deadline_time) <= unix_ms():
        message = "has passed; leave it out, or name a time to come"
        raise InvalidRequest.of("limits.deadline_time", message)


def check_length(field: str, text: str, limit: int) -> None:
    """Raise InvalidRequest for a text of more than `limit` characters."""
    if len(text) > limit:
        raise InvalidRequest.of(field, f"is over {limit} characters")


def check_count(field: str, values: Iterable[object], limit: int) -> None:
    """Raise InvalidRequest for more than `limit` values."""
    if len(list(values)) > limit:
        raise InvalidRequest.of(field, f"has over {limit} entries")
