"""The JetStream streams and consumers of the mesh.

Each stream is created by the processes that own it, gateways or `jobs`, when they start, and by commands of the
operator that use it. Creating one that exists with the same configuration does nothing, and one that exists with other
limits takes the new ones. Batchers create nothing.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import APIError, ServiceUnavailableError

from sluice.errors import TransportUnavailable
from sluice.settings import JobsSettings
from sluice.wire import subjects
from sluice.wire.codec import OversizedMessage

FETCH_MAX: Final = 256
_INACTIVE_S: Final = 30.0
"""The server deletes the consumer of an aborted read after this time."""
_OTHER_CONFIGURATION: Final = 10058
"""JetStream's error code for a stream that exists with another configuration."""


def _bucket(name: str, max_bytes: int, max_age_s: float | None = None) -> StreamConfig:
    """Return the stream of a key-value bucket: the last message of each subject."""
    config = _stream(name, subjects.bucket_prefix(name).removesuffix("."), max_bytes, max_age_s)
    return config.evolve(max_msgs_per_subject=1)


def _stream(name: str, prefix: str, max_bytes: int, max_age_s: float | None = None) -> StreamConfig:
    """Return a stream of all below `prefix` that keeps the newest messages."""
    return StreamConfig(
        name=name,
        subjects=[f"{prefix}.>"],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_bytes=max_bytes,
        max_age=max_age_s,
    )


_MIB: Final = 1024 * 1024

DEAD_LETTERS: Final = _stream(subjects.DEAD_LETTERS_STREAM, subjects.DEAD_LETTERS, 256 * _MIB)
"""Tasks that were given up, kept for operators; the oldest are deleted first."""
KEYS: Final = _bucket(subjects.KEYS_BUCKET, 256 * _MIB).evolve(allow_msg_ttl=True)
"""Idempotency keys that callers named, with the complete answers; each expires, the oldest are deleted first."""
SPENDING: Final = _bucket(subjects.SPENDING_BUCKET, 64 * _MIB, max_age_s=3660.0)
"""What each gateway's requests have cost in each minute of the last hour; the oldest are deleted first."""
DAYS: Final = _bucket(subjects.DAYS_BUCKET, 64 * _MIB, max_age_s=32 * 86_400.0)
"""What each gateway's requests have cost on each day of a month; the oldest are deleted first."""
POLICIES: Final = _bucket(subjects.POLICIES_BUCKET, 16 * _MIB)
"""The policies that gateways took with the last reload."""
SECRETS: Final = _bucket(subjects.SECRETS_BUCKET, _MIB)
"""Secrets that gateways share, and that no setting names."""
DRAINS: Final = _bucket(subjects.DRAINS_BUCKET, _MIB)
"""The workers that operators have drained."""
API_KEYS: Final = _bucket(subjects.API_KEYS_BUCKET, 64 * _MIB).evolve(discard=DiscardPolicy.NEW)
"""API keys by id; when it is full none is made."""
JOBS: Final = _bucket(subjects.JOBS_BUCKET, 256 * _MIB).evolve(discard=DiscardPolicy.NEW)
"""Records of jobs and uploads; when it is full no job is taken."""


def records_stream(max_bytes: int, max_age_s: float) -> StreamConfig:
    """Return the stream of the last record and the last grade of each request; the oldest are deleted first."""
    config = _stream(subjects.RECORDS_STREAM, subjects.RECORDS, max_bytes, max_age_s)
    return config.evolve(max_msgs_per_subject=1, allow_direct=True, allow_msg_ttl=True)


def audit_stream(max_bytes: int, max_age_s: float) -> StreamConfig:
    """Return the stream of safety decisions: clients can delete no message, but all of a tenant can be purged."""
    config = _stream(subjects.AUDIT_STREAM, subjects.AUDIT, max_bytes, max_age_s)
    return config.evolve(deny_delete=True, allow_direct=True, allow_msg_ttl=True)


def outcomes_stream(max_bytes: int, max_age_s: float) -> StreamConfig:
    """Return the stream of the last outcome and grade of each request, with prompts; the oldest are deleted first."""
    config = _stream(subjects.OUTCOMES_STREAM, subjects.OUTCOMES, max_bytes, max_age_s)
    return config.evolve(max_msgs_per_subject=1, allow_direct=True, allow_msg_ttl=True)


def answers_bucket(max_bytes: int, max_age_s: float) -> StreamConfig:
    """Return the stream of cached answers; the oldest are deleted first."""
    return _bucket(subjects.ANSWERS_BUCKET, max_bytes, max_age_s)


def job_streams(settings: JobsSettings) -> tuple[StreamConfig, ...]:
    """Return the streams of inputs and results, kept until their jobs are deleted.

    Inputs in chunks: when they are full no upload is taken. Results in segments: when they are full jobs are paused.
    """
    inputs = _stream(subjects.JOB_INPUTS_STREAM, subjects.JOB_INPUTS, settings.inputs_max_bytes)
    results = _stream(subjects.JOB_RESULTS_STREAM, subjects.JOB_RESULTS, settings.results_max_bytes)
    full = {"discard": DiscardPolicy.NEW, "allow_direct": True}
    return inputs.evolve(**full, max_msgs_per_subject=1), results.evolve(**full)


async def ensure_stream(
    js: JetStreamContext, config: StreamConfig, replicas: int, *, update: bool = True
) -> None:
    """Create a stream. If it exists with other limits or another number of servers, change them only if `update`.

    Raises:
        nats.errors.Error: JetStream does not answer, or refuses the limits.
    """
    config = config.evolve(num_replicas=replicas)
    try:
        await js.add_stream(config)
    except APIError as error:
        if error.err_code != _OTHER_CONFIGURATION:
            raise
        if update:
            await js.update_stream(config)


def explained(error: Exception) -> str:
    """Return an error of JetStream in words; of a server without JetStream with what to do."""
    if isinstance(error, ServiceUnavailableError) and not error.err_code:
        return "the server runs without JetStream: start it with -js, or add jetstream {} to its configuration"
    return str(error) or type(error).__name__


@contextmanager
def answering(what: str) -> Iterator[None]:
    """Raise TransportUnavailable if JetStream does not answer in the block, or refuses, or a message is too large.

    `what` begins its message, such as "jobs cannot be read".
    """
    try:
        yield
    except (TimeoutError, NatsError, OversizedMessage) as error:
        raise TransportUnavailable(
            f"{what}: JetStream does not answer ({type(error).__name__})"
        ) from error


async def stored_messages(
    js: JetStreamContext, stream: str, subject: str, timeout_s: float
) -> AsyncGenerator[Msg, None]:
    """Yield all current messages of `subject`, which may have wildcards.

    Raises:
        nats.errors.Error: JetStream does not answer, or there is no such stream.
    """
    config = ConsumerConfig(
        ack_policy=AckPolicy.NONE, inactive_threshold=_INACTIVE_S, mem_storage=True
    )
    reader = await js.pull_subscribe(subject, stream=stream, config=config)
    try:
        left = (await reader.consumer_info()).num_pending or 0
        while left:
            messages = await reader.fetch(min(FETCH_MAX, left), timeout=timeout_s)
            left = messages[-1].metadata.num_pending
            for message in messages:
                yield message
    finally:
        with suppress(NatsError):
            await reader.unsubscribe()
