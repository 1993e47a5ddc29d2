"""Names on NATS. Both ends build every subject here.

| subject | from, to | what |
|---|---|---|
| `sluice.batchers.<batcher>.task` | gateway, one batcher | `Task` |
| `sluice.batchers.<batcher>.control` | gateway, one batcher | `ControlMessage` |
| `sluice.frames.<gateway>` | batcher, gateway | `FrameBundle` |
| `sluice.frames.<gateway>.<account>` | the same from another account | `FrameBundle` |
| `sluice.absent.<sender>.<receiver>` | NATS, sender | "no responders": the receiver of a message is not there |
| `sluice.control` | gateway, all batchers | `ControlMessage` |
| `sluice.reports.<batcher>` | batcher, all gateways | `BatcherReport` |
| `sluice.metrics` | gateway, all processes | `ReadMetricsRequest` |
| `sluice.metrics.<gateway>.<question>` | any process, gateway | `ProcessMetrics` |
| `sluice.metrics.<gateway>.<question>.<account>` | the same from another account | `ProcessMetrics` |
| `sluice.reload` | `sluice reload`, all gateways and batchers | `ReloadQuestion` |
| `sluice.reloaded.<question>` | gateway or batcher, `sluice reload` | `ReloadAnswer` |
| `sluice.gateways` | gateway, all gateways | `GatewayHeartbeat` |
| `sluice.gateways.<gateway>` | gateway, gateway (request) | `GatewayQuery` |
| `sluice.dead_letters.<model>.<class>` | gateway, operators (JetStream) | the task, reason in headers |
| `sluice.records.<request>.request.<trace>.<tenant>` | gateway, gateways (JetStream) | `RequestRecord` |
| `sluice.records.<request>.grade` | gateway, gateways (JetStream) | `Grade` |
| `sluice.audit.<tenant>.<request>` | gateway, auditors (JetStream) | `AuditEntry` |
| `sluice.outcomes.<tenant>.<request>.outcome` | gateway, gateways (JetStream) | `Outcome` |
| `sluice.outcomes.<tenant>.<request>.grade` | gateway, gateways (JetStream) | `Grade` |
| `$KV.SLUICE_KEYS.<tenant>.<hash of the key>` | gateway, gateways (JetStream) | `KeyRecord` |
| `$KV.SLUICE_ANSWERS.<tenant>.<model>.<hash of the request>` | gateway, gateways (JetStream) | `KeyRecord` |
| `$KV.SLUICE_SPENDING.<process>.<minute>` | gateway, gateways (JetStream) | `MinuteCosts` |
| `$KV.SLUICE_DAYS.<process>.<day>` | gateway, gateways (JetStream) | `MinuteCosts` |
| `$KV.SLUICE_POLICIES.gateway` | gateway, gateways (JetStream) | `PolicyRecord` |
| `$KV.SLUICE_POLICIES.candidate` | gateway, gateways (JetStream) | `PolicyRecord` |
| `$KV.SLUICE_DRAINS.workers` | gateway, gateways (JetStream) | `DrainRecord` |
| `$KV.SLUICE_JOBS.<job>` | `jobs`, `jobs` (JetStream) | `JobRecord` |
| `$KV.SLUICE_JOBS.upload.<upload>` | `jobs`, `jobs` (JetStream) | `UploadRecord` |
| `sluice.job_inputs.<upload>.<chunk>` | `jobs`, `jobs` (JetStream) | bytes of a file, or `MessageChunk` |
| `sluice.job_results.<job>.<stage>.<attempt>` | `jobs`, `jobs` (JetStream) | `JobSegment` |
| `$KV.SLUICE_API_KEYS.<id>` | `sluice keys`, gateways (JetStream) | `ApiKeyRecord` |
| `$KV.SLUICE_SECRETS.<name>` | gateway or `jobs`, gateways and `jobs` (JetStream) | `google.protobuf.StringValue` |
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

DEAD_LETTERS_STREAM: Final = "SLUICE_DEAD_LETTERS"
DEAD_LETTERS: Final = "sluice.dead_letters"
RECORDS_STREAM: Final = "SLUICE_RECORDS"
RECORDS: Final = "sluice.records"
NO_TRACE: Final = "none"
AUDIT_STREAM: Final = "SLUICE_AUDIT"
AUDIT: Final = "sluice.audit"
OUTCOMES_STREAM: Final = "SLUICE_OUTCOMES"
OUTCOMES: Final = "sluice.outcomes"
JOB_INPUTS_STREAM: Final = "SLUICE_JOB_INPUTS"
JOB_INPUTS: Final = "sluice.job_inputs"
JOB_RESULTS_STREAM: Final = "SLUICE_JOB_RESULTS"
JOB_RESULTS: Final = "sluice.job_results"
FRAMES: Final = "sluice.frames"
CONTROL: Final = "sluice.control"
REPORTS: Final = "sluice.reports"
GATEWAYS: Final = "sluice.gateways"
METRICS: Final = "sluice.metrics"
RELOAD: Final = "sluice.reload"
RELOADED: Final = "sluice.reloaded"

KEYS_BUCKET: Final = "KV_SLUICE_KEYS"
SPENDING_BUCKET: Final = "KV_SLUICE_SPENDING"
POLICIES_BUCKET: Final = "KV_SLUICE_POLICIES"
SECRETS_BUCKET: Final = "KV_SLUICE_SECRETS"
DRAINS_BUCKET: Final = "KV_SLUICE_DRAINS"
DAYS_BUCKET: Final = "KV_SLUICE_DAYS"
JOBS_BUCKET: Final = "KV_SLUICE_JOBS"
ANSWERS_BUCKET: Final = "KV_SLUICE_ANSWERS"
API_KEYS_BUCKET: Final = "KV_SLUICE_API_KEYS"
"""Streams of the key-value buckets; the prefix is JetStream's."""
DRAINED_WORKERS: Final = "workers"
"""The one key of `DRAINS_BUCKET`."""
GATEWAY_BUCKETS: Final = (
    KEYS_BUCKET,
    SPENDING_BUCKET,
    DAYS_BUCKET,
    POLICIES_BUCKET,
    SECRETS_BUCKET,
    DRAINS_BUCKET,
    ANSWERS_BUCKET,
)
"""Buckets that gateways create and write. `jobs` may write the key of the mesh into `SECRETS_BUCKET`."""

BATCHERS: Final = "sluice.batchers"
ABSENT: Final = "sluice.absent"

ALL_TASKS: Final = f"{BATCHERS}.*.task"
ALL_CONTROL: Final = f"{BATCHERS}.*.control"
ALL_FRAMES: Final = f"{FRAMES}.*"
"""What batchers publish on."""
OBSERVED_FRAMES: Final = f"{FRAMES}.>"
"""What an observer of the traffic subscribes to."""
ALL_REPORTS: Final = f"{REPORTS}.*"

CLASSES: Final = ("interactive", "standard", "bulk")
"""Priority classes, most urgent first."""
RANKS: Final[Mapping[str, int]] = {name: rank for rank, name in enumerate(CLASSES)}
"""Ranks of the classes; 0 is the most urgent."""
BULK_CLASS: Final = "bulk"
"""Nobody waits for single tasks of this class."""
URGENT_CLASS: Final = "interactive"
"""A person waits for tasks of this class: their frames go before all others in every process."""

ANY: Final = "*"
"""Stands for every tenant, model, request or process where a function says that it takes it: a pattern to subscribe."""
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")


def is_token(name: str) -> bool:
    """Return whether `name` may stand between two dots of a subject."""
    return _TOKEN.fullmatch(name) is not None


@lru_cache(1024)
def _token(name: str) -> str:
    assert is_token(name), f"{name!r} cannot be part of a subject"
    return name


def _token_or_any(name: str) -> str:
    return name if name == ANY else _token(name)


def dead_letters(model: str, priority_class: str) -> str:
    """Return the subject of tasks that were given up."""
    return f"{DEAD_LETTERS}.{_token(model)}.{_token(priority_class)}"


@lru_cache(1024)
def frames(gateway: str) -> str:
    """Return the subject that one gateway gets its frames on."""
    return f"{FRAMES}.{_token(gateway)}"


def report(batcher: str) -> str:
    """Return the subject that one batcher reports on."""
    return f"{REPORTS}.{_token(batcher)}"


def metrics_to(process: str, question: str) -> str:
    """Return the subject of the answers to one question for metrics."""
    return f"{METRICS}.{_token(process)}.{_token(question)}"


def reloaded(question: str) -> str:
    """Return the subject of the answer to one question to reload."""
    return f"{RELOADED}.{_token(question)}"


@lru_cache(1024)
def task_to(batcher: str) -> str:
    """Return the subject of tasks for one batcher."""
    return f"{BATCHERS}.{_token(batcher)}.task"


def control_to(batcher: str) -> str:
    """Return the subject of control messages for one batcher."""
    return f"{BATCHERS}.{_token(batcher)}.control"


def all_to(batcher: str) -> str:
    """Return the pattern of `task_to` and `control_to`: one subscription keeps their order."""
    return f"{BATCHERS}.{_token(batcher)}.*"


@lru_cache(1024)
def absent(sender: str, receiver: str) -> str:
    """Return the reply subject of messages that get no reply: NATS says on it that nobody has subscribed to them.

    The receiver may be `ANY`.
    """
    return f"{ABSENT}.{_token(sender)}.{_token_or_any(receiver)}"


def gateway(name: str) -> str:
    """Return the subject that one gateway answers `GatewayQuery` on."""
    return f"{GATEWAYS}.{_token(name)}"


def bucket_prefix(stream: str) -> str:
    """Return what the subjects of a bucket begin with; its stream is `stream`."""
    return f"$KV.{stream.removeprefix('KV_')}."


def record(request: str, trace: str, tenant: str) -> str:
    """Return the subject of the record of one request in a trace ("" for what it has not); each may be `ANY`."""
    about = _token_or_any(trace or NO_TRACE), _token_or_any(tenant or NO_TRACE)
    return f"{RECORDS}.{_token_or_any(request)}.request.{'.'.join(about)}"


def grade(request: str) -> str:
    """Return the subject of the grades of one request."""
    return f"{RECORDS}.{_token(request)}.grade"


def all_of_record(request: str) -> str:
    """Return the pattern of every `record` and `grade` of one request."""
    return f"{RECORDS}.{_token(request)}.>"


def audit(tenant: str, request: str) -> str:
    """Return the subject of the safety decisions about one request; both may be `ANY`."""
    return f"{AUDIT}.{_token_or_any(tenant)}.{_token_or_any(request)}"


def outcome(tenant: str, request: str) -> str:
    """Return the subject of the outcome of one request; both may be `ANY`."""
    return f"{OUTCOMES}.{_token_or_any(tenant)}.{_token_or_any(request)}.outcome"


def outcome_grade(tenant: str, request: str) -> str:
    """Return the subject of the grade of a request whose outcome is kept; both may be `ANY`."""
    return f"{OUTCOMES}.{_token_or_any(tenant)}.{_token_or_any(request)}.grade"


def all_outcomes_of(tenant: str) -> str:
    """Return the pattern of every `outcome` and `outcome_grade` of a tenant."""
    return f"{OUTCOMES}.{_token(tenant)}.*.*"


def is_pattern(subject: str) -> bool:
    """Return whether `subject` is valid to subscribe to: tokens separated by dots, some of them wildcards."""
    *before, last = tokens = subject.split(".")
    plain = all(
        token and token.isprintable() and not set(token) & set(" *>")
        for token in tokens
        if token not in ("*", ">")
    )
    return plain and last != "" and ">" not in before


def covers(pattern: str, subject: str) -> bool:
    """Return whether `pattern` matches all that `subject` does; both may have wildcards."""
    tokens = subject.split(".")
    pattern_tokens = pattern.split(".")
    for place, token in enumerate(pattern_tokens):
        if token == ">":
            return len(tokens) > place
        if place == len(tokens) or tokens[place] == ">" or token not in ("*", tokens[place]):
            return False
    return len(tokens) == len(pattern_tokens)


def job_input(upload: str, chunk: int) -> str:
    """Return the subject of one chunk of an upload."""
    return f"{JOB_INPUTS}.{_token(upload)}.{chunk}"


def job_results(job: str, stage: int, attempt: int) -> str:
    """Return the subject of the log of one attempt at a stage of a job."""
    return f"{JOB_RESULTS}.{_token(job)}.{stage}.{attempt}"
