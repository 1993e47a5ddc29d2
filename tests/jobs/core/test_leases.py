from jobs.core.leases import HEARTBEAT_S, LEASE_S, Leases, is_suspect, record_loss, shares, urgency
from sluice.internal.v1.job_pb2 import JobRecord
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import timestamp


def record(state: "pb.JobState.ValueType", runner: str = "other") -> JobRecord:
    return JobRecord(job=pb.Job(id="job-1", state=state, runner=runner))


def test_a_queued_job_and_one_of_its_own_may_be_taken_at_once() -> None:
    leases = Leases("me")

    assert leases.may_claim(record(pb.JOB_STATE_QUEUED), 1, 0.0)
    assert leases.may_claim(record(pb.JOB_STATE_RUNNING, "me"), 1, 0.0)
    assert leases.may_claim(record(pb.JOB_STATE_RUNNING, ""), 1, 0.0)
    assert not leases.may_claim(record(pb.JOB_STATE_PAUSED), 1, 0.0)


def test_job_can_be_claimed_when_its_record_stands_still() -> None:
    leases, running = Leases("me"), record(pb.JOB_STATE_RUNNING)

    assert not leases.may_claim(running, 1, 0.0)
    assert not leases.may_claim(running, 2, LEASE_S)
    assert not leases.may_claim(running, 2, 2 * LEASE_S - 0.1)
    assert leases.may_claim(running, 2, 2 * LEASE_S)


def test_a_job_that_was_never_written_again_is_free_as_well() -> None:
    for revision in (1, 2, 7):
        leases, running = Leases("me"), record(pb.JOB_STATE_RUNNING)
        assert leases.may_claim(running, revision, 5.0) is False
        assert leases.may_claim(running, revision, 7.999) is False
        assert leases.may_claim(running, revision, 8.0) is True


def test_the_owner_writes_thrice_before_its_job_is_free() -> None:
    assert (HEARTBEAT_S, LEASE_S) == (1.0, 3.0)


def test_what_was_seen_of_a_job_ends_when_it_stops() -> None:
    leases, running = Leases("me"), record(pb.JOB_STATE_RUNNING)
    leases.may_claim(running, 1, 0.0)
    assert leases.may_claim(record(pb.JOB_STATE_PAUSED), 2, 1.0) is False
    assert not leases.may_claim(running, 1, 4.0), "it runs again"
    assert leases.may_claim(running, 1, 7.0)


def test_a_deadline_however_late_goes_before_none() -> None:
    def job(deadline_ms: int, created_ms: int) -> JobRecord:
        limits = pb.JobLimits(deadline_time=timestamp(deadline_ms) if deadline_ms else None)
        spec = pb.JobSpec(limits=limits)
        return JobRecord(job=pb.Job(spec=spec, create_time=timestamp(created_ms)))

    assert urgency(job(253_402_300_799_000, 5)) < urgency(job(0, 1)) == (1 << 62, 1)


def test_the_earliest_deadline_goes_first_then_the_oldest() -> None:
    def job(deadline: int, created: int) -> JobRecord:
        limits = pb.JobLimits(deadline_time=timestamp(deadline) if deadline else None)
        spec = pb.JobSpec(limits=limits)
        return JobRecord(job=pb.Job(spec=spec, create_time=timestamp(created)))

    waiting = [job(0, 1), job(0, 3), job(9, 4), job(5, 5)]

    assert sorted(waiting, key=urgency) == [waiting[3], waiting[2], waiting[0], waiting[1]]


def test_tenants_share_the_window_and_so_do_their_jobs() -> None:
    assert shares(512, {"a": "t", "b": "t", "c": "u"}) == {"a": 128, "b": 128, "c": 256}
    assert shares(1, {"a": "t", "b": "u"}) == {"a": 1, "b": 1}
    assert shares(8, {}) == {}


def test_losses_count_as_long_as_no_item_is_done() -> None:
    lost = record(pb.JOB_STATE_RUNNING)
    for count in (1, 2, 3):
        record_loss(lost)
        assert lost.lost_processes == count
    lost.job.progress.succeeded = 5
    record_loss(lost)
    assert lost.lost_processes == 1


def test_a_job_is_suspect_when_the_next_loss_ends_it() -> None:
    lost = record(pb.JOB_STATE_RUNNING)
    assert not is_suspect(lost, waits=True)
    record_loss(lost)
    assert not is_suspect(lost)
    assert is_suspect(lost, waits=True)
    lost.job.runner = ""
    assert not is_suspect(lost, waits=True)
    record_loss(lost)
    assert is_suspect(lost)
    lost.job.progress.dead = 1
    assert not is_suspect(lost)


def test_losses_count_while_nothing_is_done_between_them() -> None:
    lost = JobRecord()
    lost.job.progress.succeeded, lost.job.progress.dead = 3, 2
    record_loss(lost)
    assert (lost.lost_processes, lost.items_when_lost) == (1, 5)
    record_loss(lost)
    assert (lost.lost_processes, lost.items_when_lost) == (2, 5)
    lost.job.progress.dead = 3
    record_loss(lost)
    assert (lost.lost_processes, lost.items_when_lost) == (1, 6)
