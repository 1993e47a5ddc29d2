"""What an engine did, as messages of the wire."""

from model_workers.engine.protocol import Refused, RowEnd, RowStep, TokenLogprobs
from sluice.internal.v1 import frame_pb2, worker_pb2

ENGINE_FAILED = "ENGINE_FAILED"


def frame(step: RowStep, timings: frame_pb2.RowTimings | None) -> frame_pb2.Frame:
    """The frame of one row's step; ``timings`` go into a final one."""
    message = frame_pb2.Frame(
        request_id=step.request_id,
        attempt=step.attempt,
        start_index=step.start_index,
        token_ids=step.token_ids,
        logprobs=[_logprobs(entry) for entry in step.logprobs],
    )
    if step.end is not None:
        message.final.end = frame_pb2.RowEnd.ValueType(step.end)
        message.final.timings.CopyFrom(timings or frame_pb2.RowTimings())
    if step.end is RowEnd.FAILED:
        message.final.error.reason = ENGINE_FAILED
        message.final.error.message = step.error
    return message


def refusal(request_id: str, refused: Refused) -> worker_pb2.Refusal:
    """Why a row was not taken."""
    error = frame_pb2.RowError(reason=refused.reason, message=refused.message)
    return worker_pb2.Refusal(request_id=request_id, error=error, retryable=refused.retryable)


def _logprobs(entry: TokenLogprobs) -> frame_pb2.Logprobs:
    return frame_pb2.Logprobs(
        logprob=entry.logprob,
        top_token_ids=[token_id for token_id, _ in entry.top],
        top_logprobs=[logprob for _, logprob in entry.top],
    )
