"""One request that waits for its answer: frames go in, events come out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from gateway.cascades.watch import Verdict, Watch
from gateway.safety.guards.checks import Checks
from gateway.streams.assembler import Taken
from gateway.streams.endings import Hops, error_of, finish_reason_of, timings_of
from gateway.streams.leg import Leg
from gateway.streams.reader import Reader
from gateway.streams.states import LEGAL_MOVES, StreamState
from gateway.streams.transcript import Transcript
from sluice.errors import InvalidRequest, SlowReader, SluiceError
from sluice.internal.v1 import frame_pb2
from sluice.internal.v1.frame_pb2 import Frame, RowTimings
from sluice.v1.inference_pb2 import (
    FINISH_REASON_CONTENT_FILTER,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_STOP_SEQUENCE,
    NOTICE_KIND_ESCALATED,
    NOTICE_KIND_RECOVERED,
    Finished,
    FinishReason,
    GenerateResponse,
    LegUsage,
    Notice,
    Started,
    Usage,
)

_ENDED: Final = frozenset({StreamState.FINISHED, StreamState.FAILED})


@dataclass(frozen=True)
class Ticket:
    """What is fixed when a request is admitted."""

    started: Started
    deadline: float
    """On the clock of ``now``, seconds."""
    with_logprobs: bool
    hops: Hops
    key: str = ""
    """Idempotency key, empty without one."""
    fingerprint: bytes = b""
    """Equal for equal requests."""
    on_end: "Callable[[Stream], None] | None" = None
    """Called once, when the stream has ended and is forgotten."""
    cascade: "Cascade | None" = None
    """How the answer may go over to a second model."""
    guards: "Guards | None" = None
    """The guard models that check prompt and answer."""


class Cascade(Protocol):
    """How one answer may go over to a second model.

    Attributes:
        watch: watches the first model's answer.
        holds: nothing of it is shown before its commit point.
    """

    watch: Watch
    holds: bool

    def refusal(self, now: float) -> str:
        """Why the answer may not go over now; empty when it may."""

    def second(self, draft: str, now: float) -> Leg:
        """The second model's leg; ``draft`` is what the first one said. Its task must still be sent: `launch`."""

    def launch(self, stream: "Stream") -> None:
        """Sends the task of the stream's leg, the second one."""

    def ended(self) -> None:
        """The request has ended."""


class Guards(Protocol):
    """The guard models of one request."""

    @property
    def checks(self) -> Checks:
        """What they were asked, and what came of it."""

    def begin(self, stream: "Stream") -> None:
        """Asks about the prompt; the row of the answer is on its way already."""

    def produced(self, stream: "Stream", *, ended: bool) -> None:
        """The answer of ``stream`` has grown, or ended: asks what is due."""

    def restart(self) -> None:
        """Another model answers now."""

    def close(self) -> None:
        """The request has ended."""


@dataclass(frozen=True)
class Reaction:
    """What the batchers must be told after a frame."""

    resend_from: int | None = None
    confirm: bool = False
    cancel: bool = False
    hand_over: bool = False
    """The answer goes over to the second model: see `Stream.hand_over`."""


class Stream:
    """The state of one answer and of the call that reads it.

    Attributes:
        ticket: what was fixed at admission.
        state: where it stands (`StreamState`).
        reader: the call that reads, or None when it has gone.
        error: why it failed, in state FAILED.
        finished: how it ended, in state FINISHED.
        first_frame_at: when the first frame came, seconds.
        legs: the models that worked on it, in order; the last one does now.
        holding: nothing is shown before the commit point of a cascade.
    """

    def __init__(self, ticket: Ticket, leg: Leg) -> None:
        self.ticket = ticket
        self.legs = [leg]
        self._watch = None if ticket.cascade is None else ticket.cascade.watch
        self.holding = ticket.cascade is not None and ticket.cascade.holds
        self.state = StreamState.PUBLISHING
        self.reader: Reader | None = None
        self.error: SluiceError | None = None
        self.finished: Finished | None = None
        self.first_frame_at: float | None = None
        self.first_token_at: float | None = None
        self._notices: list[Notice] = []
        self._escalated_at = 0
        self._taken_tokens = 0
        """The most that a caller has been given of the leg."""
        self._withheld_from: int | None = None
        """Tokens that are ever shown, where guards ended the answer."""
        self._guard_rules: tuple[str, ...] = ()
        self._awaited: tuple[FinishReason.ValueType, RowTimings] | None = None
        """How the answer ends if no guard objects, in state CHECKING."""

    @property
    def request_id(self) -> str:
        """The name of the request."""
        return self.ticket.started.request_id

    @property
    def leg(self) -> Leg:
        """The model that works on it now."""
        return self.legs[-1]

    @property
    def row_id(self) -> str:
        """The name of the row on the wires."""
        return self.leg.row_id

    @property
    def transcript(self) -> Transcript:
        """What came of the leg."""
        return self.leg.transcript

    @property
    def ended(self) -> bool:
        """Whether nothing will be added."""
        return self.state in _ENDED

    @property
    def row_ended(self) -> bool:
        """Whether no row computes for it."""
        return self.ended or self.state is StreamState.CHECKING

    @property
    def silent(self) -> bool:
        """Whether nothing of the answer may be shown yet."""
        guards = self.ticket.guards
        return self.holding or (guards is not None and guards.checks.holds)

    @property
    def attempt(self) -> int:
        """The highest attempt seen."""
        return self.leg.assembler.attempt

    def attach(self, reader: Reader, model: str = "") -> None:
        """``reader`` reads from now on; what it holds is of ``model``, or of the present one when that is empty."""
        assert self.reader is None, "one reader at a time"
        reader.notices = len(self._notices)
        if self._left(model):
            reader.index = 0
            reader.notices = self._escalated_at
        reader.attach(len(self.transcript.shown_ids))
        self._taken_tokens = max(self._taken_tokens, reader.index)
        self.reader = reader

    def holds_beginning(self, token_ids: Sequence[int], model: str = "") -> bool:
        """Whether ``token_ids`` of ``model`` are the beginning of the answer, as far as a caller can know it."""
        return self._left(model) or self.transcript.starts_with(token_ids)

    def started(self, model: str = "") -> Started:
        """The first event for a caller who holds a part of ``model``, or nothing."""
        started = Started()
        started.CopyFrom(self.ticket.started)
        if not self._left(model):
            started.model = self.leg.model
            started.prompt_tokens = self.leg.prompt_tokens
        return started

    def published(self) -> None:
        """JetStream has the task."""
        if self.state is StreamState.PUBLISHING:
            self._move(StreamState.WAITING)

    def take(self, frame: Frame, now: float) -> Reaction:
        """Adds what ``frame`` brings."""
        if self.state is StreamState.CHECKING:  # said again: the row has ended
            return Reaction(confirm=frame.HasField("final"))
        taken = self.leg.assembler.take(frame, now)
        self._note_progress(taken, now)
        before = len(self.transcript.shown_ids)
        self._append(taken)
        # Closed by a stop string or the safety policy: the row itself may go on.
        stopped = self.transcript.closed
        if self._in_doubt(taken, stopped, now):
            ended = taken.final is not None
            return Reaction(confirm=ended, cancel=not ended, hand_over=True)
        reaction = self._conclude(taken, stopped, now)
        if self.ticket.guards is not None and not self.row_ended and not self.holding:
            self.ticket.guards.produced(self, ended=False)
        if not self.row_ended and self._reader_fell_behind(before):
            return Reaction(cancel=True)
        return reaction

    def hand_over(self, now: float) -> None:
        """The second model begins; what the first one said is void."""
        cascade = self.ticket.cascade
        assert cascade is not None, "only a cascade is handed over"
        self._go_over(cascade.second(self.transcript.draft, now))
        cascade.launch(self)

    def reroute(self, leg: Leg, reason: str) -> None:
        """A governed model answers with ``leg``; its task must still be sent."""
        self.leg.handed_over = reason
        self.stay()
        self._go_over(leg)

    def stay(self) -> None:
        """No second model answers, whatever the first one says."""
        self._watch, self.holding = None, False

    def released(self, now: float) -> None:
        """A verdict came that lets the answer go on: shows and ends what waited for it alone."""
        guards = self.ticket.guards
        assert guards is not None, "it came from them"
        if self._awaited is not None and not guards.checks.waits:
            self._finish(*self._awaited, now)
        elif not self.silent and self.reader is not None:
            self.first_token_at = self.first_token_at or (
                now if self.transcript.shown_ids else None
            )
            self.reader.grew(self.reader.index, len(self.transcript.shown_ids))
            self._wake()

    def block(self, rules: tuple[str, ...], now: float) -> None:
        """Guards end the answer: what has been given to a caller stays, nothing else is shown."""
        self._guard_rules, self._withheld_from = rules, self._taken_tokens
        self.transcript.close(truncated=True)
        row = RowTimings() if self._awaited is None else self._awaited[1]
        self._finish(FINISH_REASON_CONTENT_FILTER, row, now)

    def fail(self, error: SluiceError) -> None:
        """Ends with ``error``."""
        self.error = error
        self._move(StreamState.FAILED)
        self._wake()

    def finish(self, reason: "FinishReason.ValueType", timings: RowTimings, now: float) -> None:
        """Ends with the answer complete, or with an error when it is not what the caller holds."""
        self.transcript.close(truncated=reason != FINISH_REASON_STOP)
        if self.transcript.contradicted:
            self.fail(_contradiction())
            return
        # The held-back end may have completed either.
        if self.transcript.stop is not None:
            reason = FINISH_REASON_STOP_SEQUENCE
        elif self.transcript.blocked:
            reason = FINISH_REASON_CONTENT_FILTER
        guards = self.ticket.guards
        if guards is not None:
            guards.produced(self, ended=True)
            if guards.checks.waits:
                self._awaited = reason, timings
                self._move(StreamState.CHECKING)
                self._wake()
                return
        self._finish(reason, timings, now)

    def _finish(self, reason: "FinishReason.ValueType", timings: RowTimings, now: float) -> None:
        if self._withheld_from is None and self.transcript.shown_ids:
            self.first_token_at = self.first_token_at or now
        self.finished = self._finished_event(reason, timings, now)
        self._move(StreamState.FINISHED)
        self._wake()

    def _go_over(self, leg: Leg) -> None:
        self.legs.append(leg)
        self.holding, self._awaited = False, None
        if self.ticket.guards is not None:
            self.ticket.guards.restart()
        self._escalated_at = len(self._notices)
        self._notices.append(_escalated(self.legs[-2], self.leg))
        self._taken_tokens = 0
        if self.reader is not None:
            self.reader.index = 0
        self._move(StreamState.PUBLISHING)
        self._wake()

    def overdue(self, now: float) -> int | None:
        """The index to ask for when nothing came for too long, else None."""
        if self.state in (StreamState.PUBLISHING, StreamState.CHECKING):
            return None
        return self.leg.assembler.overdue(now)

    def resync(self, now: float) -> int:
        """The index to ask for after frames were lost on the way."""
        return self.leg.assembler.ask_now(now)

    def read(self, reader: Reader) -> list[GenerateResponse]:
        """The events that ``reader`` has not had, everything that waits in one delta.

        Raises:
            SluiceError: the stream ended with it, or another call took over.
        """
        if reader.displaced_by is not None:
            raise reader.displaced_by
        if self.error is not None:
            raise self.error
        events = [GenerateResponse(notice=notice) for notice in self._notices[reader.notices :]]
        reader.notices = len(self._notices)
        if self.silent:
            return events
        end = self._withheld_from
        delta = self.transcript.delta(reader.index, self.ticket.with_logprobs, end)
        if delta is not None:
            events.append(GenerateResponse(delta=delta))
        reader.took(max(reader.index, len(self.transcript.shown_ids[:end])))
        self._taken_tokens = max(self._taken_tokens, reader.index)
        if self.finished is not None:
            tail = self.transcript.tail() if end is None else None
            events += [GenerateResponse(delta=tail)] if tail is not None else []
            events.append(GenerateResponse(finished=self.finished))
        return events

    def _note_progress(self, taken: Taken, now: float) -> None:
        if self.first_frame_at is None:
            self.first_frame_at = now
        if taken.token_ids and self.first_token_at is None and not self.silent:
            self.first_token_at = now
        if taken.recovered:
            self._notices.append(
                Notice(
                    kind=NOTICE_KIND_RECOVERED,
                    message="another process continues the answer at the same token",
                )
            )
        if self.state is not StreamState.STREAMING and taken.token_ids:
            self._move(StreamState.STREAMING)

    def _append(self, taken: Taken) -> None:
        for position, token_id in enumerate(taken.token_ids):
            logprobs = taken.logprobs[position] if position < len(taken.logprobs) else None
            self.transcript.append(token_id, logprobs)
            if self.transcript.closed:
                return

    def _in_doubt(self, taken: Taken, stopped: bool, now: float) -> bool:
        """Whether the second model shall answer. Passing the commit point ends the watch."""
        if self._watch is None or self.transcript.contradicted or self.transcript.blocked:
            return False
        watch = self._watch
        verdict = watch.push(taken.logprobs)
        reason = None if taken.final is None else finish_reason_of(taken.final.end)
        if verdict is Verdict.PENDING and (stopped or reason is not None):
            self.transcript.close(truncated=reason != FINISH_REASON_STOP)
            truncated = reason == FINISH_REASON_LENGTH and not stopped
            verdict = watch.end(self.transcript.draft, truncated=truncated)
        if verdict is Verdict.PENDING:
            return False
        self._watch, self.holding = None, False
        self.first_token_at = self.first_token_at or now
        return verdict is Verdict.DOUBT and self._may_go_over(watch.reason, now)

    def _may_go_over(self, reason: str, now: float) -> bool:
        assert self.ticket.cascade is not None, "it was watched"
        refusal = self.ticket.cascade.refusal(now)
        if refusal:
            self.leg.kept = f"{reason}; {refusal}"
            return False
        self.leg.handed_over = reason
        return True

    def _left(self, model: str) -> bool:
        """Whether ``model`` worked on the answer before another one took over."""
        return bool(model) and model != self.leg.model and any(m.model == model for m in self.legs)

    def _conclude(self, taken: Taken, stopped: bool, now: float) -> Reaction:
        final = taken.final
        if final is not None and final.HasField("batch"):
            self.leg.batch = final.batch
        confirm = final is not None and final.end != frame_pb2.ROW_END_CANCELLED
        if stopped:
            row = RowTimings() if final is None else final.timings
            self.finish(FINISH_REASON_STOP_SEQUENCE, row, now)
            return Reaction(confirm=confirm, cancel=final is None)
        if self.transcript.contradicted:
            self.fail(_contradiction())
            return Reaction(confirm=confirm, cancel=final is None)
        if final is None:
            return Reaction(resend_from=taken.resend_from)
        reason = finish_reason_of(final.end)
        if reason is None:
            self.fail(error_of(final))
        else:
            self.finish(reason, final.timings, now)
        return Reaction(confirm=confirm)

    def _reader_fell_behind(self, before: int) -> bool:
        """Wakes the reader; ends the stream when more waits for it than it may have unread."""
        total = len(self.transcript.shown_ids)
        if self.reader is None or self.silent:
            return False
        self.reader.grew(before, total)
        if not self.reader.too_slow(total):
            self.reader.wake()
            return False
        unread = total - self.reader.index
        self.fail(
            SlowReader(f"{unread} tokens wait unread; read faster, or resume with those received")
        )
        return True

    def _finished_event(
        self, reason: "FinishReason.ValueType", row: RowTimings, now: float
    ) -> Finished:
        first_at = now if self.first_token_at is None else self.first_token_at
        return Finished(
            reason=reason,
            usage=_usage(self.leg),
            timings=timings_of(self.ticket.hops, row, first_at, now),
            stop=("" if self._guard_rules else self.transcript.stop) or "",
            rules=self._guard_rules or self.transcript.blocked,
            model=self.leg.model,
            legs=[LegUsage(model=leg.model, usage=_usage(leg)) for leg in self.legs],
        )

    def _wake(self) -> None:
        if self.reader is not None:
            self.reader.wake()

    def _move(self, target: StreamState) -> None:
        assert target in LEGAL_MOVES[self.state], f"{self.state.name} to {target.name}"
        self.state = target


def _usage(leg: Leg) -> Usage:
    return Usage(prompt_tokens=leg.prompt_tokens, completion_tokens=len(leg.transcript.token_ids))


def _escalated(first: Leg, second: Leg) -> Notice:
    return Notice(
        kind=NOTICE_KIND_ESCALATED,
        message=f"{second.model} answers instead of {first.model}: {first.handed_over}",
        model=second.model,
    )


def _contradiction() -> SluiceError:
    """The tokens that the caller resumed with are not those that it would be shown now."""
    return InvalidRequest.of(
        "resume.token_ids",
        "are not the beginning of this answer: the model or the safety policy has changed since; "
        "ask again without resume",
    )
