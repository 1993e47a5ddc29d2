"""One question to one guard model: its rows go out and come back; whatever goes wrong is a `Failure`, no error."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.accounts import Accounts
from gateway.admission import Admission, Work
from gateway.catalog import ServedModel
from gateway.dispatch import Dispatch
from gateway.guards.question import NoVerdict, Question, prompts_of
from gateway.opening import task_of
from gateway.overload import Overload
from gateway.safety.guards.families import Family
from gateway.safety.guards.verdict import Failure, Option, Outcome, Said, Unparsable, Verdict
from gateway.streams.assembler import Assembler
from gateway.streams.endings import Hops
from gateway.streams.leg import Leg
from gateway.streams.registry import Registry
from gateway.streams.stream import Stream
from gateway.streams.ticket import Ticket
from gateway.streams.transcript import Transcript
from sluice.errors import (
    Cancelled,
    DeadlinePassed,
    ModelUnavailable,
    Overloaded,
    SluiceError,
    TransportUnavailable,
)
from sluice.internal.v1.task_pb2 import Sampling
from sluice.v1.inference_pb2 import Started

WORKLOAD: Final = "guard"
"""Answers of guards are as long as each other, and nothing like those of callers."""
_ALTERNATIVES: Final = 16

_FAILURES: Final[tuple[tuple[type[SluiceError], Failure], ...]] = (
    (DeadlinePassed, Failure.TIMEOUT),
    (Overloaded, Failure.OVERLOADED),
    (ModelUnavailable, Failure.UNAVAILABLE),
    (TransportUnavailable, Failure.UNAVAILABLE),
)


@dataclass(frozen=True)
class Asking:
    """Asks guards; holds what all requests share."""

    admission: Admission
    overload: Overload
    registry: Registry
    dispatch: Dispatch
    accounts: Accounts
    stall_s: float

    async def ask(self, question: Question) -> tuple[Outcome, float]:
        """The outcome, within the time budget, and what it cost."""
        guard = question.check.guard
        streams: list[Stream] = []
        try:
            async with asyncio.timeout(guard.settings.budget_s):
                return await self._verdict(question, streams), self._cost(streams)
        except TimeoutError:
            return Failure.TIMEOUT, self._cost(streams)
        except NoVerdict as none:
            return none.failure, self._cost(streams)

    async def _verdict(self, question: Question, streams: list[Stream]) -> Verdict:
        check = question.check
        model = self.admission.catalog[check.guard.settings.model]
        problem = self.overload.problem(model.name, question.demand, time.monotonic())
        if problem is not None:
            raise NoVerdict(_failure_of(problem))
        prompts = await prompts_of(question, model)
        # Cancelled together: when one row has no verdict, nor has the question.
        rows = [
            asyncio.ensure_future(self._row(question, model, prompt, number, streams))
            for number, prompt in enumerate(prompts)
        ]
        try:
            said = await asyncio.gather(*rows)
        finally:
            for row in rows:
                row.cancel()
        try:
            return _worst([check.guard.family.reader.read(one) for one in said])
        except Unparsable:
            raise NoVerdict(Failure.UNPARSABLE) from None

    async def _row(
        self,
        question: Question,
        model: ServedModel,
        prompt: list[int],
        number: int,
        streams: list[Stream],
    ) -> Said:
        work = Work(model, prompt, _sampling(question.check.guard.family, model), None)
        ended = asyncio.Event()
        row_id = f"{question.row_id}-{number}" if number else question.row_id
        stream = self._stream(question, work, row_id, ended)
        streams.append(stream)
        self.registry.open(stream)
        self.admission.sent(work, question.request.priority_class)
        try:
            await self._publish(question, stream, work, ended)
        finally:
            # Without effect when it has ended. Nobody wants the row any more.
            self.registry.fail(stream, Cancelled("nobody waits for the verdict any more"))
            self.accounts.ended(question.request.tenant, stream, time.monotonic())
        if stream.error is not None:
            raise NoVerdict(_failure_of(stream.error))
        return _said(stream, model)

    async def _publish(
        self, question: Question, stream: Stream, work: Work, ended: asyncio.Event
    ) -> None:
        task = task_of(stream, question.request, work, self.dispatch.gateway_id)
        task.workload = WORKLOAD
        try:
            await self.dispatch.publish(task, question.headers, stream.ticket.deadline)
        except SluiceError as error:
            # Without an acknowledgement the task may have been stored all the same: frames are proof.
            if not ended.is_set():
                raise NoVerdict(_failure_of(error)) from error
        stream.published()
        await ended.wait()

    def _stream(self, question: Question, work: Work, row_id: str, ended: asyncio.Event) -> Stream:
        now = time.monotonic()
        deadline = min(question.demand.deadline, now + question.check.guard.settings.budget_s)
        tokenization = work.model.tokenization
        transcript = Transcript(
            tokenization.detokenizer(), (), tokenization.stop_token_ids, tokenization.token_text
        )
        leg = Leg(
            row_id,
            work.model.name,
            len(work.prompt_token_ids),
            transcript,
            Assembler(0, self.stall_s, now),
        )
        ticket = Ticket(
            started=Started(request_id=row_id, model=work.model.name),
            deadline=deadline,
            with_logprobs=True,
            hops=Hops(arrived_at=now),
            on_end=lambda _: ended.set(),
        )
        return Stream(ticket, leg)

    def _cost(self, streams: Sequence[Stream]) -> float:
        legs = [leg for stream in streams for leg in stream.legs]
        return sum(
            self.accounts.models[leg.model].cost(leg.prompt_tokens, len(leg.transcript.token_ids))
            for leg in legs
        )


def _sampling(family: Family, model: ServedModel) -> Sampling:
    return Sampling(
        max_tokens=family.answer_tokens,
        temperature=0.0,
        top_p=1.0,
        repetition_penalty=1.0,
        logprobs=True,
        top_logprobs=max(_ALTERNATIVES, min(32, len(model.tokenization.labels))),
        stop_token_ids=sorted(model.tokenization.stop_token_ids),
    )


def _said(stream: Stream, model: ServedModel) -> Said:
    delta = stream.transcript.delta(0, with_logprobs=True)
    if delta is None:
        return Said("")
    places = [
        [Option(one.token_id, one.text, one.logprob) for one in place.top]
        for place in delta.logprobs
    ]
    return Said(stream.transcript.draft, places)


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Of the segments of one text."""
    flagged = [one for one in verdicts if one.flagged]
    scores = [one.score for one in verdicts if one.score is not None]
    named = dict.fromkeys(name for one in flagged for name in one.categories)
    return Verdict(bool(flagged), tuple(named), max(scores, default=None))


def _failure_of(error: SluiceError) -> Failure:
    kinds = (failure for kind, failure in _FAILURES if isinstance(error, kind))
    return next(kinds, Failure.FAILED)
