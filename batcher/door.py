"""Checks a task as it comes from JetStream: behind this door tasks are trusted."""

from sluice.internal.v1 import task_pb2
from sluice.wire import subjects
from sluice.wire.codec import MalformedMessage, unpack

REQUEST_ID_CHARACTERS_MAX = 128


def task_of(payload: bytes, model: str, priority_class: str) -> task_pb2.Task:
    """The task in ``payload``, which came on the subject of ``model`` and ``priority_class``.

    Raises:
        MalformedMessage: it is not a task, or not one that can be answered; says which field is wrong.
    """
    task = unpack(task_pb2.Task, payload)
    problem = _problem(task, model, priority_class)
    if problem:
        raise MalformedMessage(problem)
    return task


def _problem(task: task_pb2.Task, model: str, priority_class: str) -> str:
    if not 0 < len(task.request_id) <= REQUEST_ID_CHARACTERS_MAX:
        return f"request_id: must have 1 to {REQUEST_ID_CHARACTERS_MAX} characters"
    if not subjects.is_token(task.gateway):
        return "gateway: cannot be part of a subject"
    if task.model != model:
        return "model: is not that of the subject"
    if task.priority_class != priority_class:
        return "priority_class: is not that of the subject"
    if not task.prompt_token_ids:
        return "prompt_token_ids: is empty"
    if task.sampling.max_tokens == 0:
        return "sampling.max_tokens: is 0"
    if task.deadline_unix_ms < 0:
        return "deadline_unix_ms: is negative"
    return ""
