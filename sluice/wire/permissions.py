"""Which subjects each process may publish and subscribe to. NATS enforces it where `tls.mesh` is set.

A credential belongs to a process of one kind with one id; with the id "*" it is shared by all of a kind, which NATS
then does not tell apart. Replies come to `inbox`, where nobody else may listen.

Whoever may change a stream can make it store any subject: batchers and `jobs` may not. They create theirs if these are
missing, and gateways (and `sluice up`) give streams their limits.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from sluice.wire import subjects

GATEWAY: Final = "gateway"
BATCHER: Final = "batcher"
JOBS: Final = "jobs"
OPERATOR: Final = "operator"
"""`sluice up`, `status` and `record`: everything."""

_API: Final = "$JS.API"


@dataclass(frozen=True)
class Permissions:
    """Patterns of subjects."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def identity(process: str) -> str:
    """The URI in a process's certificate, and its user name in NATS."""
    return f"spiffe://sluice/{process}"


def inbox(kind: str, process: str) -> str:
    """Prefix of the subjects that answers come to."""
    return f"_INBOX.{kind}.{process}"


def permissions(kind: str, process: str, input_streams: Iterable[str] = ()) -> Permissions:
    """What the process of ``kind`` with the id ``process`` may do.

    ``input_streams``: the operator's own, whose messages `jobs` may read.
    """
    rule = _RULES[kind](process)
    inputs = _each(input_streams, _get) if kind == JOBS else ()
    subscribe = (*rule.subscribe, f"{inbox(kind, process)}.>")
    return Permissions((*rule.publish, *inputs), subscribe)


def _gateway(process: str) -> Permissions:
    owned = (
        subjects.RECORDS_STREAM,
        subjects.OUTCOMES_STREAM,
        subjects.EVENTS_STREAM,
        *subjects.GATEWAY_BUCKETS,
    )
    kept = (subjects.TASKS_STREAM, subjects.DEAD_LETTERS_STREAM, subjects.AUDIT_STREAM)
    publish = (
        f"{subjects.BATCHERS}.*.*",
        subjects.CONTROL,
        f"{subjects.WAITING}.*.*",
        subjects.GATEWAYS,
        f"{subjects.GATEWAYS}.*",
        f"{inbox(GATEWAY, '*')}.>",
        subjects.METRICS,
        *_answers_metrics(),
        f"{subjects.RELOADED}.*",
        *(f"{prefix}.>" for prefix in _STORED_BY_GATEWAYS),
        *(f"{subjects.bucket_prefix(bucket)}>" for bucket in subjects.GATEWAY_BUCKETS),
        *_each(owned, _create, _change, _read, _remove),
        *_each(kept, _create, _change),
        # Operators make keys, and revoke them; with a tenant its keys are deleted, and its audit.
        *_each((subjects.API_KEYS_BUCKET,), _create, _read, _remove),
        *_each((subjects.AUDIT_STREAM, subjects.DEAD_LETTERS_STREAM), _read, _remove),
        f"{_API}.STREAM.INFO.{subjects.TASKS_STREAM}",
        f"{_API}.STREAM.PURGE.{subjects.TASKS_STREAM}",
        f"{_API}.CONSUMER.INFO.{subjects.TASKS_STREAM}.*",
    )
    subscribe = (
        f"{subjects.FRAMES}.{process}",
        f"{subjects.ABSENT}.{process}.*",
        subjects.ALL_REPORTS,
        subjects.GATEWAYS,
        f"{subjects.GATEWAYS}.{process}",
        subjects.METRICS,
        f"{subjects.METRICS}.{process}.*",
        subjects.RELOAD,
    )
    return Permissions(publish, subscribe)


def _batcher(process: str) -> Permissions:
    tasks = subjects.TASKS_STREAM
    publish = (
        subjects.ALL_FRAMES,
        f"{subjects.REPORTS}.{process}",
        f"{subjects.DEAD_LETTERS}.>",
        *_answers_metrics(),
        f"{subjects.RELOADED}.*",
        *_each((tasks, subjects.DEAD_LETTERS_STREAM, subjects.DRAINS_BUCKET), _create),
        f"{_API}.STREAM.MSG.GET.{subjects.DRAINS_BUCKET}",
        f"{_API}.STREAM.INFO.{tasks}",
        f"{_API}.CONSUMER.CREATE.{tasks}.>",
        f"{_API}.CONSUMER.DURABLE.CREATE.{tasks}.*",
        f"{_API}.CONSUMER.INFO.{tasks}.*",
        f"{_API}.CONSUMER.MSG.NEXT.{tasks}.*",
        f"$JS.ACK.{tasks}.>",
    )
    subscribe = (
        f"{subjects.BATCHERS}.{process}.*",
        subjects.CONTROL,
        f"{subjects.WAITING}.*.*",
        subjects.METRICS,
        subjects.RELOAD,
        subjects.ALL_REPORTS,
        f"{subjects.ABSENT}.{process}.*",
    )
    return Permissions(publish, subscribe)


def _jobs(_: str) -> Permissions:
    owned = (subjects.JOBS_BUCKET, subjects.JOB_INPUTS_STREAM, subjects.JOB_RESULTS_STREAM)
    records = f"{subjects.bucket_prefix(subjects.JOBS_BUCKET)}>"
    publish = (
        records,
        f"{subjects.JOB_INPUTS}.>",
        f"{subjects.JOB_RESULTS}.>",
        *_answers_metrics(),
        *_each(owned, _create, _read, _remove),
    )
    return Permissions(publish, (records, subjects.METRICS))


def _answers_metrics() -> tuple[str, ...]:
    return (f"{subjects.METRICS}.*.*",)


def _operator(_: str) -> Permissions:
    return Permissions((">",), (">",))


_RULES: Final[dict[str, Callable[[str], Permissions]]] = {
    GATEWAY: _gateway,
    BATCHER: _batcher,
    JOBS: _jobs,
    OPERATOR: _operator,
}
KINDS: Final = tuple(_RULES)

_STORED_BY_GATEWAYS: Final = (
    subjects.TASKS,
    subjects.DEAD_LETTERS,
    subjects.RECORDS,
    subjects.AUDIT,
    subjects.OUTCOMES,
    subjects.EVENTS,
)


def _each(streams: Iterable[str], *rights: Callable[[str], tuple[str, ...]]) -> Iterable[str]:
    return (subject for stream in streams for right in rights for subject in right(stream))


def _create(stream: str) -> tuple[str, ...]:
    return (f"{_API}.STREAM.CREATE.{stream}",)


def _change(stream: str) -> tuple[str, ...]:
    return (f"{_API}.STREAM.UPDATE.{stream}",)


def _remove(stream: str) -> tuple[str, ...]:
    return (f"{_API}.STREAM.PURGE.{stream}", f"{_API}.STREAM.MSG.DELETE.{stream}")


def _get(stream: str) -> tuple[str, ...]:
    return (f"{_API}.STREAM.MSG.GET.{stream}",)


def _read(stream: str) -> tuple[str, ...]:
    return (
        f"{_API}.STREAM.INFO.{stream}",
        f"{_API}.STREAM.MSG.GET.{stream}",
        f"{_API}.DIRECT.GET.{stream}",
        f"{_API}.DIRECT.GET.{stream}.>",
        f"{_API}.CONSUMER.CREATE.{stream}.>",
        f"{_API}.CONSUMER.CREATE.{stream}",
        f"{_API}.CONSUMER.INFO.{stream}.*",
        f"{_API}.CONSUMER.MSG.NEXT.{stream}.*",
        f"{_API}.CONSUMER.DELETE.{stream}.*",
    )
