"""Every error a caller can see, one tree; HTTP alone has two more (`gateway.http`).

| class | gRPC code | reason | details beside ErrorInfo |
|---|---|---|---|
| `InvalidRequest` | INVALID_ARGUMENT | REQUEST_INVALID | BadRequest |
| `PromptTooLong` | INVALID_ARGUMENT | PROMPT_TOO_LONG | BadRequest; metadata prompt_tokens, context_tokens |
| `MessageTooLarge` | INVALID_ARGUMENT | MESSAGE_TOO_LARGE | metadata bytes, limit_bytes |
| `InputInvalid` | INVALID_ARGUMENT | INPUT_INVALID | |
| `UnknownModel` | NOT_FOUND | MODEL_UNKNOWN | metadata models |
| `RecordUnknown` | NOT_FOUND | RECORD_UNKNOWN | |
| `RequestUnknown` | NOT_FOUND | REQUEST_UNKNOWN | |
| `WorkerUnknown` | NOT_FOUND | WORKER_UNKNOWN | |
| `JobUnknown` | NOT_FOUND | JOB_UNKNOWN | |
| `UploadUnknown` | NOT_FOUND | UPLOAD_UNKNOWN | |
| `WrongJobState` | FAILED_PRECONDITION | JOB_STATE_WRONG | |
| `SafetyBlocked` | FAILED_PRECONDITION | SAFETY_BLOCKED | metadata rules, policy |
| `NoDryRun` | FAILED_PRECONDITION | NO_DRY_RUN | |
| `OutcomesNotKept` | FAILED_PRECONDITION | OUTCOMES_NOT_KEPT | |
| `Unauthenticated` | UNAUTHENTICATED | UNAUTHENTICATED | metadata problem |
| `PermissionDenied` | PERMISSION_DENIED | PERMISSION_DENIED | |
| `IdempotencyConflict` | ALREADY_EXISTS | IDEMPOTENCY_KEY_REUSED | |
| `DeadlinePassed` | DEADLINE_EXCEEDED | DEADLINE_EXCEEDED | |
| `Cancelled` | CANCELLED | CANCELLED | |
| `Overloaded` | RESOURCE_EXHAUSTED | OVERLOADED | RetryInfo |
| `ExpectedLate` | RESOURCE_EXHAUSTED | EXPECTED_LATE | RetryInfo |
| `LimitReached` | RESOURCE_EXHAUSTED | LIMIT_REACHED | RetryInfo, QuotaFailure; metadata subject, limit, value |
| `BudgetSpent` | RESOURCE_EXHAUSTED | BUDGET_SPENT | RetryInfo |
| `StorageFull` | RESOURCE_EXHAUSTED | STORAGE_FULL | |
| `SlowReader` | RESOURCE_EXHAUSTED | READER_TOO_SLOW | |
| `ModelUnavailable` | UNAVAILABLE | MODEL_UNAVAILABLE | RetryInfo |
| `TransportUnavailable` | UNAVAILABLE | TRANSPORT_UNAVAILABLE | RetryInfo |
| `ShuttingDown` | UNAVAILABLE | SHUTTING_DOWN | RetryInfo |
| `JobsDisabled` | UNIMPLEMENTED | JOBS_DISABLED | |
| `EngineFailed` | INTERNAL | ENGINE_FAILED | |
| `InternalError` | INTERNAL | INTERNAL | |

Errors of Generate that come after the request was found valid have the metadata `request_id` as well.

On the wire each is a `google.rpc.Status` (AIP-193) with an `ErrorInfo` of domain "sluice"; `from_status` turns one
back into its class at the client.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Self

from google.protobuf.message import Message
from google.rpc import status_pb2
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, QuotaFailure, RetryInfo
from grpc import StatusCode

DOMAIN: Final = "sluice"
STATUS_DETAILS: Final = "grpc-status-details-bin"
"""Trailing metadata of gRPC with the `google.rpc.Status` of a call that failed."""
TEXT_MAX: Final = 1000
"""Bytes of a message or of a value in its metadata as gRPC sends it: trailers of more than 8 KiB are refused, and the
client learns neither code nor reason."""
FIELD_MAX: Final = 128
"""Bytes of the path of a wrong field, sent likewise."""
VIOLATIONS_MAX: Final = 2000
"""Bytes of all wrong fields together; the others are left out."""
RETRY_AFTER_S: Final = 1.0
"""After how many seconds a call may succeed that was refused for want of room, or of a process that will be back."""


@dataclass(frozen=True)
class FieldViolation:
    """One field of a request that is wrong, by its path in the proto, with what to do."""

    field: str
    description: str


class SluiceError(Exception):
    """Base of all: `message` says what is wrong and what to do, without any text of a prompt.

    Attributes:
        metadata: facts for programs.
        violations: fields that are wrong.
        retry_after_s: when a new try may succeed, in seconds; None: not known, or a retry does not help.
    """

    code: ClassVar[StatusCode] = StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"
    default_retry_s: ClassVar[float | None] = None
    """`retry_after_s` where it is not given."""

    def __init_subclass__(cls, *, code: StatusCode | None = None, reason: str = "") -> None:
        """Inherit `code` and `reason` unless the class names its own."""
        cls.code, cls.reason = code or cls.code, reason or cls.reason

    def __init__(
        self,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        violations: Sequence[FieldViolation] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = dict(metadata or {})
        self.violations = tuple(violations)
        self.retry_after_s = self.default_retry_s if retry_after_s is None else retry_after_s

    def of_request(self, request_id: str) -> Self:
        """Copy the error with `request_id` in its metadata: one error may end many requests."""
        error = copy.copy(self)
        error.metadata = {**self.metadata, "request_id": request_id}
        return error

    def as_abort(self) -> tuple[StatusCode, str, tuple[tuple[str, bytes], ...]]:
        """Return the arguments of gRPC's `context.abort`: code, message, trailing metadata."""
        status = self.to_status()
        return self.code, status.message, ((STATUS_DETAILS, status.SerializeToString()),)

    def to_status(self) -> status_pb2.Status:
        """Return the error as `google.rpc.Status`, its texts cut to `TEXT_MAX`."""
        status = status_pb2.Status(code=self.code.value[0], message=cut(self.message))
        info = ErrorInfo(
            reason=self.reason,
            domain=DOMAIN,
            metadata={key: cut(value) for key, value in self.metadata.items()},
        )
        status.details.add().Pack(info)
        if self.violations:
            status.details.add().Pack(_bad_request(self.violations))
        if self.retry_after_s is not None:
            retry = RetryInfo()
            retry.retry_delay.FromNanoseconds(int(self.retry_after_s * 1e9))
            status.details.add().Pack(retry)
        return status


class InvalidRequest(SluiceError, code=StatusCode.INVALID_ARGUMENT, reason="REQUEST_INVALID"):
    """The request cannot be served as it is."""

    @classmethod
    def of(cls, field: str, description: str) -> "InvalidRequest":
        """Return the error for one wrong field."""
        return cls(f"{field}: {description}", violations=[FieldViolation(field, description)])


class PromptTooLong(SluiceError, code=StatusCode.INVALID_ARGUMENT, reason="PROMPT_TOO_LONG"):
    """Prompt and answer do not fit into the model's context."""


class MessageTooLarge(SluiceError, code=StatusCode.INVALID_ARGUMENT, reason="MESSAGE_TOO_LARGE"):
    """The request message is over the size limit."""


class InputInvalid(SluiceError, code=StatusCode.INVALID_ARGUMENT, reason="INPUT_INVALID"):
    """The input of a job cannot be read: its format, its compression or its columns."""


class UnknownModel(SluiceError, code=StatusCode.NOT_FOUND, reason="MODEL_UNKNOWN"):
    """No model of that name."""


class RecordUnknown(SluiceError, code=StatusCode.NOT_FOUND, reason="RECORD_UNKNOWN"):
    """Nothing is kept about a request of that id."""


class RequestUnknown(SluiceError, code=StatusCode.NOT_FOUND, reason="REQUEST_UNKNOWN"):
    """No request of that id runs now."""


class WorkerUnknown(SluiceError, code=StatusCode.NOT_FOUND, reason="WORKER_UNKNOWN"):
    """The model has no worker of that name."""


class JobUnknown(SluiceError, code=StatusCode.NOT_FOUND, reason="JOB_UNKNOWN"):
    """The tenant has no job of that id."""


class UploadUnknown(SluiceError, code=StatusCode.NOT_FOUND, reason="UPLOAD_UNKNOWN"):
    """The tenant has no complete upload of that id."""


class WrongJobState(SluiceError, code=StatusCode.FAILED_PRECONDITION, reason="JOB_STATE_WRONG"):
    """The job is in a state in which that cannot be done."""


class SafetyBlocked(SluiceError, code=StatusCode.FAILED_PRECONDITION, reason="SAFETY_BLOCKED"):
    """The safety policy does not let the prompt through.

    Metadata: `rules`, names with commas between them, and `policy`, its version; never any text.
    """


class NoDryRun(SluiceError, code=StatusCode.FAILED_PRECONDITION, reason="NO_DRY_RUN"):
    """No safety policy is under trial."""


class Unauthenticated(SluiceError, code=StatusCode.UNAUTHENTICATED, reason="UNAUTHENTICATED"):
    """It is not known who calls.

    Metadata: `problem`: CREDENTIALS_MISSING, KEY_INVALID, KEY_EXPIRED, KEY_REVOKED, TOKEN_INVALID, TOKEN_EXPIRED or
    CERTIFICATE_UNKNOWN.
    """

    @classmethod
    def of(cls, problem: str, message: str) -> "Unauthenticated":
        """Return the error with its metadata."""
        return cls(message, metadata={"problem": problem})


class PermissionDenied(SluiceError, code=StatusCode.PERMISSION_DENIED, reason="PERMISSION_DENIED"):
    """This caller may not do that."""


class OutcomesNotKept(SluiceError, code=StatusCode.FAILED_PRECONDITION, reason="OUTCOMES_NOT_KEPT"):
    """The tenant, or every tenant, has not let its prompts be kept to learn from."""


class IdempotencyConflict(
    SluiceError, code=StatusCode.ALREADY_EXISTS, reason="IDEMPOTENCY_KEY_REUSED"
):
    """The idempotency key belongs to another request."""


class DeadlinePassed(SluiceError, code=StatusCode.DEADLINE_EXCEEDED, reason="DEADLINE_EXCEEDED"):
    """The deadline came before the answer was complete."""


class Cancelled(SluiceError, code=StatusCode.CANCELLED, reason="CANCELLED"):
    """The caller cancelled, or a newer call with the same idempotency key took over."""


class Overloaded(SluiceError, code=StatusCode.RESOURCE_EXHAUSTED, reason="OVERLOADED"):
    """A bound is reached; try again later."""


class ExpectedLate(Overloaded, reason="EXPECTED_LATE"):
    """The answer would come after the deadline, because of work that stands before it."""


class BudgetSpent(SluiceError, code=StatusCode.RESOURCE_EXHAUSTED, reason="BUDGET_SPENT"):
    """The tenant has spent its budget of this hour, and the named model costs more than the one that still answers."""


class LimitReached(SluiceError, code=StatusCode.RESOURCE_EXHAUSTED, reason="LIMIT_REACHED"):
    """A tenant, a key, or a tenant's use of a model has reached one of its limits.

    Metadata: `subject`, `limit` (the setting) and `value`.
    """

    def to_status(self) -> status_pb2.Status:
        """Add the limit as a QuotaFailure."""
        status = super().to_status()
        violation = QuotaFailure.Violation(
            subject=cut(self.metadata.get("subject", ""), FIELD_MAX), description=cut(self.message)
        )
        status.details.add().Pack(QuotaFailure(violations=[violation]))
        return status


class StorageFull(SluiceError, code=StatusCode.RESOURCE_EXHAUSTED, reason="STORAGE_FULL"):
    """JetStream has no room for what is to be kept."""


class SlowReader(SluiceError, code=StatusCode.RESOURCE_EXHAUSTED, reason="READER_TOO_SLOW"):
    """The client reads slower than its buffer allows; resume with the tokens received."""


class ModelUnavailable(SluiceError, code=StatusCode.UNAVAILABLE, reason="MODEL_UNAVAILABLE"):
    """No worker serves the model now."""


class TransportUnavailable(
    SluiceError, code=StatusCode.UNAVAILABLE, reason="TRANSPORT_UNAVAILABLE"
):
    """NATS, or another service that is needed, does not respond; try again."""

    default_retry_s: ClassVar[float | None] = RETRY_AFTER_S


class ShuttingDown(SluiceError, code=StatusCode.UNAVAILABLE, reason="SHUTTING_DOWN"):
    """This process is shutting down; another one may answer."""

    default_retry_s = RETRY_AFTER_S


class JobsDisabled(SluiceError, code=StatusCode.UNIMPLEMENTED, reason="JOBS_DISABLED"):
    """This mesh runs no process of jobs."""


class EngineFailed(SluiceError, code=StatusCode.INTERNAL, reason="ENGINE_FAILED"):
    """The engine could not compute this row."""


class InternalError(SluiceError, code=StatusCode.INTERNAL, reason="INTERNAL"):
    """A fault of ours; the log of the process has it."""


BY_REASON: Final[Mapping[str, type[SluiceError]]] = {
    kind.reason: kind for kind in (*SluiceError.__subclasses__(), *Overloaded.__subclasses__())
}


def from_status(status: status_pb2.Status) -> SluiceError | None:
    """Return the error that `SluiceError.to_status` made, or None for a foreign status.

    An unknown reason becomes an InternalError.
    """
    info, bad, retry = ErrorInfo(), BadRequest(), RetryInfo()
    if not _has(status, info) or info.domain != DOMAIN:
        return None
    _has(status, bad)
    again_s = retry.retry_delay.ToNanoseconds() / 1e9 if _has(status, retry) else None
    return BY_REASON.get(info.reason, InternalError)(
        status.message,
        metadata=info.metadata,
        violations=[FieldViolation(v.field, v.description) for v in bad.field_violations],
        retry_after_s=again_s,
    )


def cut(text: str, limit: int = TEXT_MAX) -> str:
    """Cut `text` to what gRPC sends in `limit` bytes: all but printable ASCII is percent-encoded."""
    size = 0
    for place, char in enumerate(text[:limit]):
        size += (
            1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode("utf-8", "replace"))
        )
        if size > limit:
            return text[:place]
    return text[:limit]


def _bad_request(violations: Sequence[FieldViolation]) -> BadRequest:
    bad = BadRequest()
    for one in violations:
        bad.field_violations.add(field=cut(one.field, FIELD_MAX), description=cut(one.description))
        if bad.ByteSize() > VIOLATIONS_MAX:
            del bad.field_violations[-1]
            break
    return bad


def _has(status: status_pb2.Status, detail: Message) -> bool:
    """Unpack the detail of this type from `status` into `detail`; return whether there is one."""
    return any(one.Unpack(detail) for one in status.details)


class SetupError(Exception):
    """Something on this machine is missing, taken or broken; the message names it and says what to do, in one line."""


class SettingsError(ValueError):
    """The configuration cannot work; the message names the key and says what to do."""
