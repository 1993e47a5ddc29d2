"""Serve /v1/completions: one or several prompts, which `echo` repeats before their answers.

Each prompt is a request of its own: admitted, limited, recorded and traced separately. The log-probabilities of an
echoed prompt come from one more request, to Score.
"""

import asyncio
import hashlib
from contextlib import nullcontext
from typing import Any, Final

from gateway.api.generate import Generator, Write
from gateway.api.texts import SCORE, respond
from gateway.http.call import HttpCall
from gateway.http.logprobs import Echo
from gateway.http.requests import add_headers, generate_request
from gateway.models.tokenizer import ControlToken
from gateway.validation.requests import CLASSES_OF
from sluice.defaults import AUTO
from sluice.openai.fields import BadField, check_kind
from sluice.openai.prompts import prompts_of
from sluice.openai.requests import COMPLETIONS
from sluice.v1 import inference_pb2 as pb

RUNNING_MAX: Final = 16
"""Most prompts of one call that are answered at the same time."""


def _is_prompt_alone(request: pb.GenerateRequest) -> bool:
    return request.sampling.HasField("max_tokens") and not request.sampling.max_tokens


class PromptAnswers:
    """The answers to one call.

    Attributes:
        with_usage: As `generate_request` returns it.
        echoes: Echoed prompts, by the index of the choice.
    """

    def __init__(self, generator: Generator, call: HttpCall, body: dict[str, Any]) -> None:
        """Read the requests of `body`, with the options of the headers.

        Raises:
            BadField: A field is unknown, or its value is invalid.
            InvalidRequest: A header is invalid.
        """
        self.with_usage: bool | None = None
        self.echoes: dict[int, Echo] = {}
        self._generator = generator
        self._call = call
        self._write_lock = asyncio.Lock()
        self._slots = asyncio.Semaphore(RUNNING_MAX)
        self._echo = False if body.get("echo") is None else body["echo"]
        check_kind("echo", self._echo, bool)
        fields = {name: value for name, value in body.items() if name != "echo"}
        self._requests = list[pb.GenerateRequest]()
        for prompt in prompts_of(body.get("prompt")):
            request, self.with_usage = generate_request(COMPLETIONS, {**fields, "prompt": prompt})
            self._requests.append(request)
        # All requests have the same options, so the first one is checked.
        first = self._requests[0]
        scored = self._echo and first.sampling.HasField("logprobs")
        if scored and first.model in ("", AUTO):
            raise BadField("model: is required with echo and logprobs; name one model")
        is_special = (
            self._echo or len(self._requests) > 1
        )  # validation refuses one plain prompt itself
        if is_special and not scored and _is_prompt_alone(first):
            raise BadField("max_tokens: is 0; send at least 1, or echo with logprobs")
        streams = self.with_usage is not None
        for position, request in enumerate(self._requests):
            call.remaining_s = add_headers(call.metadata, request, streams=streams)
            # The prompts need different idempotency keys.
            if (key := request.idempotency_key) and position:
                own_key = hashlib.sha256(f"{position} {key}".encode())
                request.idempotency_key = own_key.hexdigest()

    async def answer(self, write: Write) -> None:
        """Answer all prompts; pass their messages to `write`, one at a time.

        Raises:
            SluiceError: The first error of a prompt; the others are cancelled.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for position, request in enumerate(self._requests):
                    await self._slots.acquire()
                    group.create_task(self._answer_one(position, request, write))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _answer_one(self, position: int, request: pb.GenerateRequest, write: Write) -> None:
        count = request.sampling.n or 1

        async def write_one(response: pb.GenerateResponse) -> None:
            response.answer_index += position * count
            async with self._write_lock:
                await write(response)

        call, limiter = self._call, self._generator.limiter
        slot = limiter.running(CLASSES_OF[request.priority], call.caller.tenant)
        try:
            # The call itself has the slot of the first prompt.
            with slot if position else nullcontext():
                if self._echo:
                    echo = await self._echo_of(request)
                    indexes = range(position * count, (position + 1) * count)
                    self.echoes.update(dict.fromkeys(indexes, echo))
                    if _is_prompt_alone(request):
                        await write_one(self._empty_answer(request, echo))
                        return
                # The first prompt has the id of the call, by which the client knows the answer.
                request_id = None if position else call.request_id
                await self._generator.answer(request, call, write_one, request_id)
        finally:
            self._slots.release()

    async def _echo_of(self, request: pb.GenerateRequest) -> Echo:
        token_ids, tokenizer = list(request.tokens.token_ids), None
        if request.model in self._generator.catalog.callable:
            tokenizer = self._generator.catalog[request.model].tokenizer
        if not request.sampling.HasField("logprobs"):
            if tokenizer is None or not token_ids:
                return Echo(request.prompt)
            try:
                return Echo(tokenizer.decode(token_ids))
            except ControlToken:  # the request itself fails with an error about it
                return Echo("")
        text = request.prompt
        if tokenizer is not None and len(text) <= tokenizer.token_chars_max:
            prompt_ids = token_ids or [*tokenizer.lead, *tokenizer.bare(text)]
            if len(prompt_ids) == 1:  # nothing comes before the token, so it has no log-probability
                token = tokenizer.token_text(prompt_ids[0], is_first=True)
                entry = pb.TokenLogprobs(text=token.text, token_bytes=token.data)
                return Echo(token.text, [entry], 1)
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
        response = await respond(self._generator, SCORE, scored, self._call)
        tokens, (answer,) = response.answers[0].tokens, response.answers
        text = "".join(entry.text for entry in tokens)
        return Echo(text, list(tokens), len(tokens) - len(answer.logprobs))

    def _empty_answer(self, request: pb.GenerateRequest, echo: Echo) -> pb.GenerateResponse:
        """Return the one message of an answer that is the prompt alone."""
        usage = pb.Usage(prompt_tokens=len(echo.tokens))
        finished = pb.Finished(reason=pb.FINISH_REASON_LENGTH, usage=usage, model=request.model)
        started = pb.Started(request_id=self._call.request_id, model=request.model)
        return pb.GenerateResponse(started=started, finished=finished)
