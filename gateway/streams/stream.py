"""One request that waits for its answer: frames go in, events come out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.safety.answer import AnswerInspection
from gateway.streams.assembler import Assembler, Taken
from gateway.streams.endings import Hops, error_of, finish_reason_of, timings_of
from gateway.streams.reader import Reader
from gateway.streams.states import LEGAL_MOVES, StreamState
from gateway.streams.transcript import Transcript
from sluice.errors import InvalidRequest, SlowReader, SluiceError
from sluice.internal.v1 import frame_pb2
from sluice.internal.v1.frame_pb2 import BatchInfo, Frame, RowTimings
from sluice.v1.inference_pb2 import (
    FINISH_REASON_CONTENT_FILTER,
    FINISH_REASON_STOP,
    FINISH_REASON_STOP_SEQUENCE,
    NOTICE_KIND_RECOVERED,
    Finished,
    FinishReason,
    GenerateResponse,
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
    answer: AnswerInspection | None = None
    """What the safety policy does about the answer; its filter is in the transcript."""
    on_end: "Callable[[Stream], None] | None" = None
    """Called once, when the stream has ended and is forgotten."""


@dataclass(frozen=True)
class Reaction:
    """What the batchers must be told after a frame."""

    resend_from: int | None = None
    confirm: bool = False
    cancel: bool = False


class Stream:
    """The state of one answer and of the call that reads it.

    Attributes:
        ticket: what was fixed at admission.
        state: where it stands (`StreamState`).
        reader: the call that reads, or None when it has gone.
        error: why it failed, in state FAILED.
        finished: how it ended, in state FINISHED.
        first_frame_at: when the first frame came, seconds.
        batch: the batch that the row was sent in last; None until the row has ended.
    """

    def __init__(
        self, ticket: Ticket, transcript: Transcript, stall_s: float, now: float, held: int
    ) -> None:
        self.ticket = ticket
        self.transcript = transcript
        self.state = StreamState.PUBLISHING
        self.reader: Reader | None = None
        self.error: SluiceError | None = None
        self.finished: Finished | None = None
        self.first_frame_at: float | None = None
        self.first_token_at: float | None = None
        self.batch: BatchInfo | None = None
        self._assembler = Assembler(held, stall_s, now)
        self._notices: list[Notice] = []

    @property
    def request_id(self) -> str:
        """The name of the request."""
        return self.ticket.started.request_id

    @property
    def ended(self) -> bool:
        """Whether nothing will be added."""
        return self.state in _ENDED

    @property
    def attempt(self) -> int:
        """The highest attempt seen."""
        return self._assembler.attempt

    def attach(self, reader: Reader) -> None:
        """``reader`` reads from now on."""
        assert self.reader is None, "one reader at a time"
        reader.attach(len(self.transcript.shown_ids))
        reader.notices = len(self._notices)
        self.reader = reader

    def published(self) -> None:
        """JetStream has the task."""
        if self.state is StreamState.PUBLISHING:
            self._move(StreamState.WAITING)

    def take(self, frame: Frame, now: float) -> Reaction:
        """Adds what ``frame`` brings."""
        taken = self._assembler.take(frame, now)
        self._note_progress(taken, now)
        before = len(self.transcript.shown_ids)
        self._append(taken)
        reaction = self._conclude(taken, now)
        if not self.ended and self._reader_fell_behind(before):
            return Reaction(cancel=True)
        return reaction

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
        self.finished = self._finished_event(reason, timings, now)
        self._move(StreamState.FINISHED)
        self._wake()

    def overdue(self, now: float) -> int | None:
        """The index to ask for when nothing came for too long, else None."""
        return None if self.state is StreamState.PUBLISHING else self._assembler.overdue(now)

    def resync(self, now: float) -> int:
        """The index to ask for after frames were lost on the way."""
        return self._assembler.ask_now(now)

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
        delta = self.transcript.delta(reader.index, self.ticket.with_logprobs)
        if delta is not None:
            events.append(GenerateResponse(delta=delta))
        reader.took(max(reader.index, len(self.transcript.shown_ids)))
        if self.finished is not None:
            tail = self.transcript.tail()
            events += [GenerateResponse(delta=tail)] if tail is not None else []
            events.append(GenerateResponse(finished=self.finished))
        return events

    def _note_progress(self, taken: Taken, now: float) -> None:
        if self.first_frame_at is None:
            self.first_frame_at = now
        if taken.token_ids and self.first_token_at is None:
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

    def _conclude(self, taken: Taken, now: float) -> Reaction:
        final = taken.final
        if final is not None and final.HasField("batch"):
            self.batch = final.batch
        confirm = final is not None and final.end != frame_pb2.ROW_END_CANCELLED
        if self.transcript.closed:
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
        if self.reader is None:
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
            usage=Usage(
                prompt_tokens=self.ticket.started.prompt_tokens,
                completion_tokens=len(self.transcript.token_ids),
            ),
            timings=timings_of(self.ticket.hops, row, first_at, now),
            stop=self.transcript.stop or "",
            rules=self.transcript.blocked,
        )

    def _wake(self) -> None:
        if self.reader is not None:
            self.reader.wake()

    def _move(self, target: StreamState) -> None:
        assert target in LEGAL_MOVES[self.state], f"{self.state.name} to {target.name}"
        self.state = target


def _contradiction() -> SluiceError:
    """The tokens that the caller resumed with are not those that it would be shown now."""
    return InvalidRequest.of(
        "resume.token_ids",
        "are not the beginning of this answer: the model or the safety policy has changed since; "
        "ask again without resume",
    )
