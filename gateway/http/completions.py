"""/v1/completions with several prompts in a call, and with prompts repeated in front of their answers (`echo`).

Each prompt is a request of its own: admitted, limited, recorded and traced for itself. One more request to Score gives
the log-probabilities of a prompt.
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

from gateway.api.generate import Generator, Write
from gateway.api.texts import SCORE, answer_texts
from gateway.http.call import HttpCall
from gateway.http.echo import Echo
from gateway.http.requests import generate_request
from gateway.models.tokenizer import ControlToken
from gateway.validation.requests import CLASSES_OF
from sluice.defaults import AUTO
from sluice.openai.fields import BadField, check_kind
from sluice.openai.prompts import prompts_of
from sluice.openai.requests import COMPLETIONS
from sluice.v1 import inference_pb2 as pb

RUNNING_MAX: Final = 16
"""Prompts of a call that are answered at the same time."""


@dataclass(frozen=True)
class Asked:
    """What a body of /v1/completions asks for.

    Attributes:
        requests: one for each prompt.
        echo: whether prompts stand in front of their answers.
        with_usage: as of `generate_request`.
    """

    requests: Sequence[pb.GenerateRequest]
    echo: bool
    with_usage: bool | None


def is_several(body: Mapping[str, Any]) -> bool:
    """Return whether a body of /v1/completions has several prompts, or asks for their echo."""
    return bool(body.get("echo")) or len(prompts_of(body.get("prompt"))) > 1


def completion_requests(body: dict[str, Any]) -> Asked:
    """Return what ``body`` asks for.

    Raises:
        BadField: a field is not served, or its value does not fit.
    """
    echo = body.get("echo") or False
    check_kind("echo", echo, bool)
    rest = {name: value for name, value in body.items() if name != "echo"}
    asked = [
        generate_request(COMPLETIONS, {**rest, "prompt": prompt})
        for prompt in prompts_of(body.get("prompt"))
    ]
    requests, with_usage = [request for request, _ in asked], asked[0][1]
    scored = echo and requests[0].sampling.HasField("logprobs")
    if scored and requests[0].model in ("", AUTO):
        raise BadField("model: is not named; log-probabilities of a prompt are those of one model")
    if _is_prompt_alone(requests[0]) and not scored:
        raise BadField("max_tokens: is 0; send at least 1, or echo with logprobs")
    return Asked(requests, echo, with_usage)


def _is_prompt_alone(request: pb.GenerateRequest) -> bool:
    return request.sampling.HasField("max_tokens") and not request.sampling.max_tokens


class PromptAnswers:
    """The answers to one call.

    Attributes:
        echoes: the prompts, by the index of the choice.
    """

    def __init__(self, generator: Generator, call: HttpCall, asked: Asked) -> None:
        """``asked``: whose requests have what the headers say."""
        self.echoes: dict[int, Echo] = {}
        self._generator = generator
        self._call = call
        self._asked = asked
        self._turn = asyncio.Lock()
        self._places = asyncio.Semaphore(RUNNING_MAX)

    async def answer(self, write: Write) -> None:
        """Pass the messages of all answers to ``write``, one at a time.

        Raises:
            SluiceError: the first that one of them raised; the others were cancelled.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for place, request in enumerate(self._asked.requests):
                    await self._places.acquire()
                    group.create_task(self._answer_one(place, request, write))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _answer_one(self, place: int, request: pb.GenerateRequest, write: Write) -> None:
        count = request.sampling.n or 1

        async def write_one(response: pb.GenerateResponse) -> None:
            response.answer_index += place * count
            async with self._turn:
                await write(response)

        call, limiter = self._call, self._generator.limiter
        further = limiter.running(CLASSES_OF[request.priority], call.caller.tenant)
        try:
            with further if place else nullcontext():
                if self._asked.echo:
                    echo = await self._echo_of(request)
                    indexes = range(place * count, (place + 1) * count)
                    self.echoes.update(dict.fromkeys(indexes, echo))
                    if _is_prompt_alone(request):
                        await write_one(self._nothing_more(request, echo))
                        return
                request_id = None if place else call.request_id
                await self._generator.answer(request, call, write_one, request_id)
        finally:
            self._places.release()

    async def _echo_of(self, request: pb.GenerateRequest) -> Echo:
        token_ids, tokenizer = list(request.tokens.token_ids), None
        if request.model in self._generator.catalog.callable:
            tokenizer = self._generator.catalog[request.model].tokenizer
        if not request.sampling.HasField("logprobs"):
            if tokenizer is None or not token_ids:
                return Echo(request.prompt)
            try:
                return Echo(tokenizer.decode(token_ids))
            except ControlToken:  # of which the request tells
                return Echo("")
        text = request.prompt
        if tokenizer is not None and len(text) <= tokenizer.token_chars_max:
            known = token_ids or [*tokenizer.lead, *tokenizer.bare(text)]
            if len(known) == 1:  # which nothing comes before
                piece = tokenizer.piece(known[0], is_first=True)
                entry = pb.TokenLogprobs(text=piece.text, token_bytes=piece.data)
                return Echo(piece.text, [entry], 1)
        scored = pb.ScoreRequest(
            model=request.model,
            alternatives=request.sampling.logprobs,
            priority=request.priority,
            labels=request.labels,
        )
        if token_ids:
            scored.token_answers.add(token_ids=token_ids)
        else:
            scored.answers.append(text)
        response, _ = await answer_texts(self._generator, SCORE, scored, self._call)
        tokens, (answer,) = response.answers[0].tokens, response.answers
        text = "".join(entry.text for entry in tokens)
        return Echo(text, list(tokens), len(tokens) - len(answer.logprobs))

    def _nothing_more(self, request: pb.GenerateRequest, echo: Echo) -> pb.GenerateResponse:
        """Return the message of an answer that is the prompt alone."""
        usage = pb.Usage(prompt_tokens=len(echo.tokens))
        finished = pb.Finished(reason=pb.FINISH_REASON_LENGTH, usage=usage, model=request.model)
        started = pb.Started(request_id=self._call.request_id, model=request.model)
        return pb.GenerateResponse(started=started, finished=finished)


def own_key(key: str, place: int) -> str:
    """Return the idempotency key of the prompt at ``place`` of a call with ``key``."""
    if not key or not place:
        return key
    return hashlib.sha256(f"{place} {key}".encode()).hexdigest()
