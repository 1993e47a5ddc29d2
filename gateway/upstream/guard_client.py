"""One question to one guard model: its rows go out and come back; whatever goes wrong is a `Failure`, no error."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.admission.overload import OverloadControl
from gateway.admission.prompts import PreparedPrompt
from gateway.admission.usage import UsageAccounting
from gateway.models.catalog import ServedModel
from gateway.safety.guards.families import (
    Failure,
    Family,
    GuardVerdict,
    Option,
    Outcome,
    Said,
    Unparsable,
)
from gateway.streaming.assembler import Assembler
from gateway.streaming.leg import Leg
from gateway.streaming.stream import Stream
from gateway.streaming.transcript import Transcript
from gateway.upstream.guard_prompts import NoVerdict, Question, prompts_of
from gateway.upstream.model_rows import OwnRow, Rows, Wanted
from sluice.errors import (
    DeadlinePassed,
    ModelUnavailable,
    Overloaded,
    SluiceError,
    TransportUnavailable,
)
from sluice.internal.v1.task_pb2 import Sampling

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

    rows: Rows
    overload: OverloadControl
    usage: UsageAccounting

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

    async def _verdict(self, question: Question, streams: list[Stream]) -> GuardVerdict:
        check = question.check
        model = self.rows.admission.catalog[check.guard.settings.model]
        problem = self.overload.problem(model.name, question.scheduling, time.monotonic())
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
        row = OwnRow(self.rows, self._wanted(question, model, prompt, number))
        streams.append(row.stream)
        try:
            return _said(await row.answered(), model)
        except SluiceError as error:
            raise NoVerdict(_failure_of(error)) from error
        finally:
            self.usage.ended(question.request.tenant, row.stream, time.monotonic())

    def _wanted(
        self, question: Question, model: ServedModel, prompt: list[int], number: int
    ) -> Wanted:
        now, guard = time.monotonic(), question.check.guard
        tokenizer = model.tokenizer
        transcript = Transcript(
            tokenizer.detokenizer(), (), tokenizer.stop_token_ids, tokenizer.token_text
        )
        row_id = f"{question.row_id}-{number}" if number else question.row_id
        assembler = Assembler(0, self.rows.stall_s, now)
        return Wanted(
            question.request,
            PreparedPrompt(model, prompt, _sampling(guard.family, model), None),
            Leg(row_id, model.name, len(prompt), transcript, assembler),
            min(question.scheduling.deadline, now + guard.settings.budget_s),
            question.headers,
            WORKLOAD,
            with_logprobs=True,
        )

    def _cost(self, streams: Sequence[Stream]) -> float:
        return sum(self.usage.cost(leg) for stream in streams for leg in stream.legs)


def _sampling(family: Family, model: ServedModel) -> Sampling:
    return Sampling(
        max_tokens=family.answer_tokens,
        temperature=0.0,
        top_p=1.0,
        repetition_penalty=1.0,
        logprobs=True,
        top_logprobs=max(_ALTERNATIVES, min(32, len(model.tokenizer.labels))),
        stop_token_ids=sorted(model.tokenizer.stop_token_ids),
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


def _worst(verdicts: Sequence[GuardVerdict]) -> GuardVerdict:
    """Of the segments of one text."""
    flagged = [one for one in verdicts if one.flagged]
    scores = [one.score for one in verdicts if one.score is not None]
    named = dict.fromkeys(name for one in flagged for name in one.categories)
    return GuardVerdict(bool(flagged), tuple(named), max(scores, default=None))


def _failure_of(error: SluiceError) -> Failure:
    kinds = (failure for kind, failure in _FAILURES if isinstance(error, kind))
    return next(kinds, Failure.FAILED)
