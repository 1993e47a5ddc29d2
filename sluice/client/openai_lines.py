"""A result of a job as a line of OpenAI's batch output: what its SDK and the tools around it read.

An answer has ``response`` with status 200. A request that failed has the HTTP status of its error and the error in the
body. A line of the input that was no item has no ``response``, and ``error``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import grpc

from sluice.client.answer import Answer
from sluice.errors import SluiceError
from sluice.v1 import inference_pb2, jobs_pb2
from sluice.wire.enums import value_of

COMPLETIONS: Final = "/v1/completions"

_HTTP: Final[Mapping[int, int]] = {
    code.value[0]: status
    for code, status in {
        grpc.StatusCode.INVALID_ARGUMENT: 400,
        grpc.StatusCode.FAILED_PRECONDITION: 400,
        grpc.StatusCode.PERMISSION_DENIED: 403,
        grpc.StatusCode.NOT_FOUND: 404,
        grpc.StatusCode.ALREADY_EXISTS: 409,
        grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
        grpc.StatusCode.CANCELLED: 499,
        grpc.StatusCode.UNAVAILABLE: 503,
        grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    }.items()
}
_FINISH: Final = {
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_CONTENT_FILTER: "content_filter",
}
_FILTERED: Final = ("SAFETY_BLOCKED",)


def output_line(job_id: str, result: jobs_pb2.JobResult) -> dict[str, Any]:
    """The line of a result; ``job_id`` is part of its id."""
    line: dict[str, Any] = {
        "id": f"batch_req_{job_id}_{result.index}",
        "custom_id": result.custom_id,
        "response": None,
        "error": None,
    }
    if result.WhichOneof("outcome") == "answer":
        answer = result.answer
        line["response"] = _response(200, answer.request_id, _body(result.url, answer))
    elif result.error.request_id or result.attempts:
        error = result.error
        line["response"] = _response(
            _HTTP.get(error.code, 500), error.request_id, _error_body(error)
        )
    else:
        message = f"line {result.line}: {result.error.message}"
        line["error"] = {"code": result.error.reason, "message": message}
    return line


def result_of(
    index: int, line: int, custom_id: str, url: str, outcome: Answer | SluiceError
) -> jobs_pb2.JobResult:
    """What the client got, as the result of a job would say it."""
    result = jobs_pb2.JobResult(index=index, line=line, custom_id=custom_id, url=url, attempts=1)
    if isinstance(outcome, SluiceError):
        result.error.code = outcome.code.value[0]
        result.error.reason, result.error.message = outcome.reason, outcome.message
        result.error.request_id = outcome.metadata.get("request_id", "")
        return result
    result.answer.request_id, result.answer.model = outcome.request_id, outcome.model
    result.answer.text = outcome.text
    word = outcome.finish_reason.value
    result.answer.finish_reason = (
        inference_pb2.FINISH_REASON_UNSPECIFIED
        if word == "unknown"
        else value_of(inference_pb2.FinishReason, word)
    )
    usage = outcome.usage
    result.answer.usage.prompt_tokens = usage.prompt_tokens
    result.answer.usage.completion_tokens = usage.completion_tokens
    result.answer.usage.cached_prompt_tokens = usage.cached_prompt_tokens
    result.answer.rules.extend(outcome.rules)
    for one in outcome.logprobs:
        top = [
            inference_pb2.TokenLogprob(token_id=t.token_id, text=t.text, logprob=t.logprob)
            for t in one.top
        ]
        result.answer.logprobs.add(logprob=one.logprob, top=top)
    return result


def _response(status: int, request_id: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": request_id, "body": body}


def _body(url: str, answer: jobs_pb2.JobAnswer) -> dict[str, Any]:
    is_chat = url != COMPLETIONS
    finish = _FINISH.get(answer.finish_reason, "stop")
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
    if is_chat:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        choice["message"] = message
        if answer.logprobs:
            choice["logprobs"] = {"content": _logprobs(answer.logprobs)}
    else:
        choice["text"] = answer.text
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{answer.request_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": answer.finish_time.seconds,
        "model": answer.model,
        "choices": [choice],
        "usage": _usage(answer.usage),
    }


def _usage(usage: inference_pb2.Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
    }


def _logprobs(entries: Sequence[inference_pb2.TokenLogprobs]) -> list[dict[str, Any]]:
    """The text of a drawn token is known where it is among the most probable ones."""
    described = []
    for entry in entries:
        top = [{"token": one.text, "logprob": one.logprob, "bytes": None} for one in entry.top]
        drawn = next((one.text for one in entry.top if one.logprob == entry.logprob), "")
        described.append(
            {"token": drawn, "logprob": entry.logprob, "bytes": None, "top_logprobs": top}
        )
    return described


def _error_body(error: jobs_pb2.JobItemError) -> dict[str, Any]:
    status = _HTTP.get(error.code, 500)
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    code = "content_filter" if error.reason in _FILTERED else error.reason.lower()
    described = {"message": error.message, "type": kind, "param": None, "code": code}
    return {"error": described}
