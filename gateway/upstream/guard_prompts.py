"""One question to one guard, and the prompts of the rows that put it."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.admission.overload import SchedulingParams
from gateway.models.catalog import ServedModel
from gateway.models.tokenizer import TemplateRefused
from gateway.safety.guards.checks import Check
from gateway.safety.guards.families import Failure, Message
from gateway.validation.requests import ValidRequest

SEGMENTS_MAX: Final = 32
"""Rows of one question to a classifier, whose context is short; a longer text is too long."""
_THREAD_CHARS: Final = 8192


class NoVerdict(Exception):
    """Why there is none."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


@dataclass(frozen=True)
class Question:
    """A check, and the request that it is about.

    Attributes:
        asked: turns of caller and model as the model may see them, the caller's last.
        headers: trace context of its rows.
        row_id: how they are named; several get a number behind it.
    """

    check: Check
    request: ValidRequest
    scheduling: SchedulingParams
    asked: Sequence[Message]
    headers: Mapping[str, str]
    row_id: str


async def prompts_of(question: Question, model: ServedModel) -> list[list[int]]:
    """The prompts of the rows, each of which fits the guard's context."""
    text = sum(len(turn["content"]) for turn in question.asked) + len(question.check.answer)
    if text > _THREAD_CHARS:
        return await asyncio.to_thread(_prompts_now, question, model)
    return _prompts_now(question, model)


def _prompts_now(question: Question, model: ServedModel) -> list[list[int]]:
    check, tokenizer = question.check, model.tokenizer
    family = check.guard.family
    room = model.context_tokens - family.answer_tokens
    if family.classifies:
        prompts = tokenizer.segments(_judged(question), room)
        if len(prompts) > SEGMENTS_MAX:
            raise NoVerdict(Failure.TOO_LONG)
        return prompts
    messages = family.messages(question.asked, check.answer)
    try:
        prompt = _encoded(messages, family.variables, model)
    except TemplateRefused:
        raise NoVerdict(Failure.FAILED) from None
    if len(prompt) > room:
        raise NoVerdict(Failure.TOO_LONG)
    return [prompt]


def _judged(question: Question) -> str:
    if question.check.in_answer:
        return question.check.answer
    return "\n".join(turn["content"] for turn in question.asked if turn["role"] == "user")


def _encoded(
    messages: Sequence[Message], variables: Mapping[str, Any], model: ServedModel
) -> list[int]:
    if model.tokenizer.template is None:
        return model.tokenizer.encode_text("\n".join(turn["content"] for turn in messages))
    return model.tokenizer.encode_chat(messages, variables)
