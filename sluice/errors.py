"""Every error a caller can see, one tree.

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
| `DeadlinePassed` | DEADLINE_EXCEEDED | DEADLINE_PASSED | |
| `Cancelled` | CANCELLED | CANCELLED | |
| `Overloaded` | RESOURCE_EXHAUSTED | OVERLOADED | RetryInfo |
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

Errors of Generate that come after the request was found valid have the metadata ``request_id`` as well.

On the wire each is a ``google.rpc.Status`` (AIP-193) with an ``ErrorInfo`` of domain "sluice"; `from_status` turns one
back into its class at the client.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Self

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

DOMAIN: Final = "sluice"
STATUS_DETAILS: Final = "grpc-status-details-bin"
"""Trailing metadata of gRPC with the ``google.rpc.Status`` of a call that failed."""
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
    """Base of all: ``message`` says what is wrong and what to do, without any text of a prompt.

    Attributes:
        metadata: facts for programs.
        violations: fields that are wrong.
        retry_after_s: when a new try may succeed, seconds; None where a retry does not help.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"

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
        self.retry_after_s = retry_after_s

    def of_request(self, request_id: str) -> Self:
        """The same error with ``request_id`` in its metadata. A copy: one error may end many requests."""
        error = copy.copy(self)
        error.metadata = {**self.metadata, "request_id": request_id}
        return error

    def as_abort(self) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
        """What ``context.abort`` of gRPC takes: code, message, trailing metadata."""
        status = self.to_status()
        return self.code, status.message, ((STATUS_DETAILS, status.SerializeToString()),)

    def to_status(self) -> status_pb2.Status:
        """The error as ``google.rpc.Status``, its texts cut to `TEXT_MAX`."""
        status = status_pb2.Status(code=self.code.value[0], message=cut(self.message))
        info = error_details_pb2.ErrorInfo(
            reason=self.reason,
            domain=DOMAIN,
            metadata={key: cut(value) for key, value in self.metadata.items()},
        )
        status.details.append(_any(info))
        if self.violations:
            status.details.append(_any(_bad_request(self.violations)))
        if self.retry_after_s is not None:
            delay = duration_pb2.Duration()
            delay.FromNanoseconds(int(self.retry_after_s * 1e9))
            status.details.append(_any(error_details_pb2.RetryInfo(retry_delay=delay)))
        return status


class InvalidRequest(SluiceError):
    """The request cannot be served as it is."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "REQUEST_INVALID"

    @classmethod
    def of(cls, field: str, description: str) -> "InvalidRequest":
        """One wrong field."""
        return cls(f"{field}: {description}", violations=[FieldViolation(field, description)])


class PromptTooLong(SluiceError):
    """Prompt and answer do not fit into the model's context."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "PROMPT_TOO_LONG"


class MessageTooLarge(SluiceError):
    """The request message is over the size limit."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "MESSAGE_TOO_LARGE"


class InputInvalid(SluiceError):
    """The input of a job cannot be read: its format, its compression or its columns."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INPUT_INVALID"


class UnknownModel(SluiceError):
    """No model of that name."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "MODEL_UNKNOWN"


class RecordUnknown(SluiceError):
    """Nothing is kept about a request of that id."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "RECORD_UNKNOWN"


class RequestUnknown(SluiceError):
    """No request of that id runs now."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "REQUEST_UNKNOWN"


class WorkerUnknown(SluiceError):
    """The model has no worker of that name."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "WORKER_UNKNOWN"


class JobUnknown(SluiceError):
    """The tenant has no job of that id."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "JOB_UNKNOWN"


class UploadUnknown(SluiceError):
    """The tenant has no complete upload of that id."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "UPLOAD_UNKNOWN"


class WrongJobState(SluiceError):
    """The job is in a state in which that cannot be done."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "JOB_STATE_WRONG"


class SafetyBlocked(SluiceError):
    """The safety policy does not let the prompt through.

    Metadata: ``rules``, names with commas between them, and ``policy``, its version; never any text.
    """

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "SAFETY_BLOCKED"


class NoDryRun(SluiceError):
    """No safety policy is under trial."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "NO_DRY_RUN"


class Unauthenticated(SluiceError):
    """It is not known who calls.

    Metadata: ``problem``: CREDENTIALS_MISSING, KEY_INVALID, KEY_EXPIRED, KEY_REVOKED, TOKEN_INVALID, TOKEN_EXPIRED or
    CERTIFICATE_UNKNOWN.
    """

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"

    @classmethod
    def of(cls, problem: str, message: str) -> "Unauthenticated":
        """With the metadata."""
        return cls(message, metadata={"problem": problem})


class PermissionDenied(SluiceError):
    """This caller may not do that."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class OutcomesNotKept(SluiceError):
    """The tenant, or every tenant, has not let its prompts be kept to learn from."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "OUTCOMES_NOT_KEPT"


class IdempotencyConflict(SluiceError):
    """The idempotency key belongs to another request."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "IDEMPOTENCY_KEY_REUSED"


class DeadlinePassed(SluiceError):
    """The deadline came before the answer was complete."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_PASSED"


class Cancelled(SluiceError):
    """The caller cancelled, or a newer call with the same idempotency key took over."""

    code = grpc.StatusCode.CANCELLED
    reason = "CANCELLED"


class Overloaded(SluiceError):
    """A bound is reached; try again later."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "OVERLOADED"


class BudgetSpent(SluiceError):
    """The tenant has spent its budget of this hour, and the named model costs more than the one that still answers."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "BUDGET_SPENT"


class LimitReached(SluiceError):
    """A tenant, a key, or a tenant's use of a model has reached one of its limits.

    Metadata: ``subject``, ``limit`` (the setting) and ``value``.
    """

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "LIMIT_REACHED"

    def to_status(self) -> status_pb2.Status:
        """With the limit as a QuotaFailure too."""
        status = super().to_status()
        violation = error_details_pb2.QuotaFailure.Violation(
            subject=cut(self.metadata.get("subject", ""), FIELD_MAX), description=cut(self.message)
        )
        status.details.append(_any(error_details_pb2.QuotaFailure(violations=[violation])))
        return status


class StorageFull(SluiceError):
    """JetStream has no room for what is to be kept."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "STORAGE_FULL"


class SlowReader(SluiceError):
    """The client reads slower than its buffer allows; resume with the tokens received."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "READER_TOO_SLOW"


class ModelUnavailable(SluiceError):
    """No worker serves the model now."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "MODEL_UNAVAILABLE"


class TransportUnavailable(SluiceError):
    """NATS does not take the task."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "TRANSPORT_UNAVAILABLE"


class ShuttingDown(SluiceError):
    """This process is shutting down; another one may answer."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "SHUTTING_DOWN"


class JobsDisabled(SluiceError):
    """This mesh runs no process of jobs."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "JOBS_DISABLED"


class EngineFailed(SluiceError):
    """The engine could not compute this row."""

    code = grpc.StatusCode.INTERNAL
    reason = "ENGINE_FAILED"


class InternalError(SluiceError):
    """A fault of ours; the log of the process has it."""

    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"


BY_REASON: Final[Mapping[str, type[SluiceError]]] = {
    kind.reason: kind for kind in SluiceError.__subclasses__()
}


def from_status(status: status_pb2.Status) -> SluiceError | None:
    """The error that `SluiceError.to_status` made, or None when the status is not ours."""
    info = error_details_pb2.ErrorInfo()
    if not any(detail.Unpack(info) for detail in status.details) or info.domain != DOMAIN:
        return None
    kind = BY_REASON.get(info.reason, InternalError)
    return kind(
        status.message,
        metadata=info.metadata,
        violations=_violations(status),
        retry_after_s=_retry_after_s(status),
    )


def _any(
    detail: error_details_pb2.ErrorInfo
    | error_details_pb2.BadRequest
    | error_details_pb2.RetryInfo
    | error_details_pb2.QuotaFailure,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def cut(text: str, limit: int = TEXT_MAX) -> str:
    """As much of the begin of ``text`` as gRPC sends in ``limit`` bytes: all but printable ASCII is percent-encoded."""
    size = 0
    for place, char in enumerate(text[:limit]):
        size += (
            1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode("utf-8", "replace"))
        )
        if size > limit:
            return text[:place]
    return text[:limit]


def _bad_request(violations: Sequence[FieldViolation]) -> error_details_pb2.BadRequest:
    bad = error_details_pb2.BadRequest()
    for one in violations:
        bad.field_violations.add(field=cut(one.field, FIELD_MAX), description=cut(one.description))
        if bad.ByteSize() > VIOLATIONS_MAX:
            del bad.field_violations[-1]
            break
    return bad


def _violations(status: status_pb2.Status) -> list[FieldViolation]:
    bad = error_details_pb2.BadRequest()
    if not any(detail.Unpack(bad) for detail in status.details):
        return []
    return [FieldViolation(v.field, v.description) for v in bad.field_violations]


def _retry_after_s(status: status_pb2.Status) -> float | None:
    retry = error_details_pb2.RetryInfo()
    if not any(detail.Unpack(retry) for detail in status.details):
        return None
    return float(retry.retry_delay.ToNanoseconds()) / 1e9


class SetupError(Exception):
    """Something on this machine is missing, taken or broken; the message names it and says what to do, in one line."""


class SettingsError(ValueError):
    """The configuration cannot work; the message names the key and says what to do."""
