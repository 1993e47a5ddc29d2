"""Write the result of a job's item as a line of OpenAI's batch output, which its SDK and other tools read.

An answer has a `response` with status 200. A request that failed has a `response` with the HTTP status of its error,
and the error in its body. A line of the input that is not an item has `error` and no `response`.
"""

import json
from typing import Any

from sluice.openai.answers import SHAPES, choice, finish_reason, whole_answer
from sluice.openai.embeddings import EMBEDDINGS, FORMATS, embeddings_object
from sluice.openai.errors import error_body, http_status
from sluice.openai.requests import CHAT
from sluice.v1 import jobs_pb2


def output_line(job_id: str, result: jobs_pb2.JobResult) -> dict[str, Any]:
    """Return the line of a result; `job_id` is part of its id."""
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
        status = http_status(error.code, error.reason)
        body = error_body(status, error.reason, error.message)
        line["response"] = _response(status, error.request_id, body)
    else:
        message = f"line {result.line}: {result.error.message}"
        line["error"] = {"code": result.error.reason, "message": message}
    return line


def encoded_line(job_id: str, result: jobs_pb2.JobResult) -> bytes:
    """Return the line of a result as JSON in UTF-8, with a line end."""
    line = output_line(job_id, result)
    return json.dumps(line, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def _response(status: int, request_id: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": request_id, "body": body}


def _body(url: str, answer: jobs_pb2.JobAnswer) -> dict[str, Any]:
    if url == EMBEDDINGS:
        return embeddings_object(answer, FORMATS[0])
    shape = SHAPES.get(url, SHAPES[CHAT])
    parts = shape.message(answer.text, answer.logprobs, reasoning=answer.reasoning)
    choices = [choice(0, parts, finish_reason(answer.finish_reason))]
    created = answer.finish_time.seconds
    return whole_answer(shape, answer.request_id, created, answer.model, choices, answer.usage)
