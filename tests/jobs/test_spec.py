"""Each field of a job that may be large, many or long has a bound, and the error names the field."""

import json

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from jobs import service
from jobs.input.template import PROMPT_CHARS_MAX, Template
from jobs.service import LIST_BYTES
from jobs.spec import check_limits, check_spec
from sluice.errors import InvalidRequest
from sluice.openai.fields import BadField
from sluice.v1 import jobs_pb2 as pb
from sluice.v1.inference_pb2 import SamplingParams
from sluice.wire.clock import timestamp, unix_ms
from tests.jobs.gateway_double import GatewayDouble
from tests.jobs.processes import Processes, lines

DAY = 24 * 3600
LONG = Duration(seconds=DAY + 1)
WAITS = (LONG, Duration(seconds=-1), Duration(nanos=-1), Duration(seconds=1 << 62))
SPECS: list[tuple[pb.JobSpec, str]] = [
    (pb.JobSpec(name="x" * 129), "spec.name"),
    (pb.JobSpec(priority=77), "spec.priority"),  # type: ignore[arg-type]
    (pb.JobSpec(input=pb.JobInput(format=77)), "spec.input.format"),  # type: ignore[arg-type]
    (pb.JobSpec(input=pb.JobInput(url="s3://" + "x" * 2048)), "spec.input.url"),
    (pb.JobSpec(input=pb.JobInput(nats_subject="x" * 257)), "spec.input.nats_subject"),
    (pb.JobSpec(input=pb.JobInput(id_field="x" * 129)), "spec.input.id_field"),
    (pb.JobSpec(webhook=pb.JobWebhook(url="https://" + "x" * 2048)), "spec.webhook.url"),
    (pb.JobSpec(webhook=pb.JobWebhook(secret="x" * 257)), "spec.webhook.secret"),
    (pb.JobSpec(stages=[pb.JobStage()] * 17), "spec.stages"),
    (pb.JobSpec(stages=[pb.JobStage(), pb.JobStage(name="x" * 129)]), "spec.stages[1].name"),
    (pb.JobSpec(dedupe=pb.JobDedupe(reuse_job_ids=["job-1"] * 101)), "spec.dedupe.reuse_job_ids"),
    (pb.JobSpec(labels={str(n): "" for n in range(33)}), "spec.labels"),
    (pb.JobSpec(labels={"k" * 65: ""}), "spec.labels." + "k" * 65),
    (pb.JobSpec(labels={"": "v"}), "spec.labels."),
    (pb.JobSpec(labels={"k": "v" * 513}), "spec.labels.k"),
    (pb.JobSpec(labels={str(n): "\u754c" * 256 for n in range(32)}), "spec.labels"),
    (pb.JobSpec(retries=pb.JobRetries(max_retries=101)), "spec.retries.max_retries"),
    *((pb.JobSpec(input=pb.JobInput(nats_idle=one)), "spec.input.nats_idle") for one in WAITS),
    (pb.JobSpec(retries=pb.JobRetries(initial_backoff=LONG)), "spec.retries.initial_backoff"),
    (pb.JobSpec(retries=pb.JobRetries(max_backoff=LONG)), "spec.retries.max_backoff"),
]
LIMITS: list[tuple[pb.JobLimits, str]] = [
    *((pb.JobLimits(max_cost=one), "limits.max_cost") for one in (-1, float("nan"), float("inf"))),
    *(
        (pb.JobLimits(max_bad_line_share=one), "limits.max_bad_line_share")
        for one in (-0.1, 1.1, float("nan"))
    ),
    *((pb.JobLimits(item_timeout=one), "limits.item_timeout") for one in WAITS),
    (pb.JobLimits(deadline_time=timestamp(unix_ms() + 400 * DAY * 1000)), "limits.deadline_time"),
]


@pytest.mark.parametrize(("spec", "field"), SPECS)
def test_a_specification_out_of_bounds_is_refused_by_its_field(
    spec: pb.JobSpec, field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_spec(spec)
    assert [one.field for one in refused.value.violations] == [field]


@pytest.mark.parametrize(("limits", "field"), LIMITS)
def test_limits_out_of_bounds_are_refused_by_their_field(limits: pb.JobLimits, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_limits(limits)
    assert [one.field for one in refused.value.violations] == [field]


def test_what_is_within_the_bounds_is_taken() -> None:
    check_spec(
        pb.JobSpec(
            name="x" * 128,
            labels={f"{n:064d}": "v" * 256 for n in range(32)},
            retries=pb.JobRetries(max_retries=100, max_backoff=Duration(seconds=DAY)),
        )
    )
    check_limits(pb.JobLimits(deadline_time=timestamp(unix_ms() + 300 * DAY * 1000)))


def test_a_template_does_not_multiply_a_row() -> None:
    template = Template("{text}" * 10_000)
    assert len(template.render({"text": "x" * 100})) == 1_000_000
    with pytest.raises(BadField, match=f"over {PROMPT_CHARS_MAX} characters"):
        template.render({"text": "x" * 1_000_000})  # would be 10 GB


async def test_a_page_of_a_list_has_few_entries_when_they_are_large(
    processes: Processes, gateway: GatewayDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LIST_BYTES < 16 * 1024 * 1024
    monkeypatch.setattr(service, "LIST_BYTES", 5000)
    gateway.hold.clear()
    await processes.start()
    made = [
        (await processes.create(lines(1), labels={"k": "v" * 250}, name="x" * 100)).id
        for _ in range(30)
    ]
    for method, request, field in (
        ("ListJobs", pb.ListJobsRequest(page_size=1000), "jobs"),
        ("ListUploads", pb.ListUploadsRequest(page_size=1000), "uploads"),
    ):
        seen, pages = list[str](), 0
        while not pages or request.page_token:
            answer = await processes.ask(method, request)
            assert answer.ByteSize() < 6000
            seen += [getattr(one, "id", "") or one.upload_id for one in getattr(answer, field)]
            request.page_token, pages = answer.next_page_token, pages + 1
        assert len(seen) == len(set(seen)) == 30
        assert pages >= 2 or field == "uploads"
        assert field == "uploads" or set(seen) == set(made)


INPUT = pb.JobInput(upload_id="u")
LATE = pb.JobLimits(deadline_time=timestamp(1))
LARGE = pb.JobSpec(model="echo", input=INPUT, sampling=SamplingParams(regex="a" * 64 * 1024))
STATES = [pb.JOB_STATE_QUEUED] * (len(pb.JobState.values()) + 1)
CALLS: list[tuple[str, Message, str]] = [
    ("ListJobs", pb.ListJobsRequest(page_token="x" * 129), "page_token"),
    ("ListJobs", pb.ListJobsRequest(states=STATES), "states"),
    ("ListUploads", pb.ListUploadsRequest(page_token="x" * 129), "page_token"),
    ("RetryDeadLetters", pb.RetryDeadLettersRequest(id="j", reasons=["x"] * 65), "reasons"),
    ("RetryDeadLetters", pb.RetryDeadLettersRequest(id="j", reasons=["x" * 129]), "reasons"),
    ("CreateJob", pb.CreateJobRequest(spec=pb.JobSpec(name="x" * 129)), "spec.name"),
    ("CreateJob", pb.CreateJobRequest(spec=LARGE), "spec"),
    ("ResumeJob", pb.ResumeJobRequest(id="j", limits=pb.JobLimits(max_cost=-1)), "limits.max_cost"),
    ("ResumeJob", pb.ResumeJobRequest(id="j", limits=LATE), "limits.deadline_time"),
]


async def test_calls_out_of_bounds_are_refused_by_their_field(processes: Processes) -> None:
    await processes.start()
    given = pb.JobInput(upload_id=await processes.upload(lines(1)))
    spec = pb.JobSpec(model="echo", input=given)
    late = pb.JobSpec(model="echo", input=given, limits=LATE)
    for method, request, field in (
        *CALLS,
        ("CreateJob", pb.CreateJobRequest(spec=spec, idempotency_key="k" * 129), "idempotency_key"),
        ("CreateJob", pb.CreateJobRequest(spec=late), "limits.deadline_time"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            await processes.ask(method, request)
        assert [one.field for one in refused.value.violations] == [field]


async def test_line_cannot_blow_up_its_result_or_prompt(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    named = json.dumps({"id": "named", "x" * 900_000: 1, "prompt": "a"}).encode() + b"\n"
    job = await processes.ended((await processes.create(named * 2 + lines(1))).id)
    assert job.progress.dead == 2
    letters = await processes.results(job.id)
    assert all(len(one.error.message) <= 1000 for one in letters)

    upload = await processes.upload(json.dumps({"text": "x" * 900_000}).encode() + b"\n")
    given = pb.JobInput(upload_id=upload, template="{text}" * 10_000)
    job = await processes.ended((await processes.create(input=given)).id)
    (letter,) = await processes.results(job.id)
    assert (letter.error.reason, letter.error.code) == ("BAD_LINE", 3)
    assert str(PROMPT_CHARS_MAX) in letter.error.message
