"""Who may claim a job, in which order, and how much each of them may have in flight."""

import pytest

from jobs.core.leases import HEARTBEAT_S, LEASE_S, Leases, is_suspect, record_loss, shares, urgency
from sluice.internal.v1.job_pb2 import JobRecord
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import timestamp

QUEUED, RUNNING, PAUSED = pb.JOB_STATE_QUEUED, pb.JOB_STATE_RUNNING, pb.JOB_STATE_PAUSED


def record(state: "pb.JobState.ValueType" = RUNNING, runner: str = "other") -> JobRecord:
    return JobRecord(job=pb.Job(id="job-1", state=state, runner=runner))


@pytest.mark.parametrize(
    ("seen", "claimed"),
    [
        ([(QUEUED, "other", 1, 0.0)], [True]),
        ([(RUNNING, "me", 1, 0.0)], [True]),
        ([(RUNNING, "", 1, 0.0)], [True]),
        ([(PAUSED, "other", 1, 0.0)], [False]),
        ([(RUNNING, "other", 7, at) for at in (5.0, 7.999, 8.0)], [False, False, True]),
        (
            [(RUNNING, "other", revision, at) for revision, at in ((1, 0.0), (2, 3.0), (2, 5.9))],
            [False, False, False],
        ),
        (
            [
                (RUNNING, "other", 1, 0.0),
                (PAUSED, "other", 2, 1.0),
                (RUNNING, "other", 1, 4.0),
                (RUNNING, "other", 1, 7.0),
            ],
            [False, False, False, True],
        ),
    ],
    ids=["queued", "own", "left", "paused", "stands-still", "written", "runs-again"],
)
def test_which_jobs_may_be_claimed(
    seen: list[tuple["pb.JobState.ValueType", str, int, float]], claimed: list[bool]
) -> None:
    assert (HEARTBEAT_S, LEASE_S) == (1.0, 3.0)
    leases = Leases("me")
    assert [leases.may_claim(record(*job), at, now) for *job, at, now in seen] == claimed  # type: ignore[arg-type]


def test_the_earliest_deadline_goes_first_then_the_oldest() -> None:
    def job(deadline: int, created: int) -> JobRecord:
        limits = pb.JobLimits(deadline_time=timestamp(deadline) if deadline else None)
        spec = pb.JobSpec(limits=limits)
        return JobRecord(job=pb.Job(spec=spec, create_time=timestamp(created)))

    waiting = [job(0, 1), job(0, 3), job(9, 4), job(5, 5), job(253_402_300_799_000, 6)]
    order = [waiting[number] for number in (3, 2, 4, 0, 1)]
    assert sorted(waiting, key=urgency) == order
    assert urgency(waiting[0]) == (1 << 62, 1)


def test_tenants_share_the_window_and_so_do_their_jobs() -> None:
    assert shares(512, {"a": "t", "b": "t", "c": "u"}) == {"a": 128, "b": 128, "c": 256}
    assert shares(1, {"a": "t", "b": "u"}) == {"a": 1, "b": 1}
    assert shares(8, {}) == {}


def test_a_job_is_suspect_when_the_next_loss_ends_it() -> None:
    lost = record()
    lost.job.progress.succeeded, lost.job.progress.dead = 3, 2
    assert not is_suspect(lost, waits=True)
    record_loss(lost)
    assert (lost.lost_processes, lost.items_when_lost) == (1, 5)
    assert not is_suspect(lost)
    assert is_suspect(lost, waits=True)
    lost.job.runner = ""
    assert not is_suspect(lost, waits=True)
    record_loss(lost)
    assert (lost.lost_processes, lost.items_when_lost) == (2, 5)
    assert is_suspect(lost)
    lost.job.progress.dead = 3
    assert not is_suspect(lost), "an item was done since"
    record_loss(lost)
    assert (lost.lost_processes, lost.items_when_lost) == (1, 6)
