"""What callers may see of one answer, who reads it, and what has been delivered."""

from collections.abc import Callable, Sequence
from typing import Protocol

from gateway.identity.resume_token import ResumeToken
from gateway.streaming.row import Row
from gateway.streaming.row_result import RowRequest
from sluice.errors import SlowReader, SluiceError
from sluice.internal.v1.frame_pb2 import RowTimings
from sluice.internal.v1.gateway_pb2 import ReplacedModel, StoredAnswer
from sluice.v1.inference_pb2 import Delta, Finished, GenerateResponse, Notice, Started, Timings
from sluice.wire.tokens import VisibleToken


class RequestTimes(Protocol):
    """How long the steps of a request's admission took."""

    def timings(self, row: RowTimings, first_token_at: float, now: float) -> Timings:
        """The timings of an answer that ends ``now``."""


class AnsweredRequest(RowRequest, Protocol):
    """The request that an answer is for."""

    @property
    def log(self) -> RequestTimes:
        """What happened to it."""

    @property
    def key(self) -> str:
        """Its idempotency key; empty without one."""

    @property
    def fingerprint(self) -> bytes:
        """Equal for equal requests."""

    @property
    def with_logprobs(self) -> bool:
        """Whether callers get log-probabilities."""

    def started(self) -> Started:
        """The first event of the answer, of the model that is asked first."""

    def resume_token(self, model: str) -> ResumeToken:
        """The resume token at the beginning of an answer of ``model``."""


class Reader:
    """The position of one call in an answer.

    The number of unread tokens is bounded by ``limit``. A single arrival that is larger than that (a catch-up after a
    loss, the part of an answer that existed when the call came) is not the reader's fault, so only tokens count that
    came after the arrival that found it idle.

    Attributes:
        index: tokens read so far.
        notices: notices read so far.
        wake: called when there is something to read.
        stop: called with the error that ends the call, which may be waiting for a client that does not read.
        displaced_by: the error that ends this call although the answer may go on for another one.
    """

    def __init__(
        self,
        index: int,
        limit: int,
        wake: Callable[[], None],
        stop: Callable[[SluiceError], None] = lambda _: None,
    ) -> None:
        self.index = index
        self.notices = 0
        self.wake = wake
        self.stop = stop
        self.displaced_by: SluiceError | None = None
        self._limit = limit
        self._burst = 0

    def grew(self, before: int, total: int) -> bool:
        """The answer grew from ``before`` to ``total`` tokens in one arrival; whether more than the limit is unread."""
        if self.index >= before:
            self._burst = total - before
        return total - self.index - self._burst > self._limit

    def displace(self, error: SluiceError) -> None:
        """The call ends with ``error``; another one reads instead."""
        self.displaced_by = error
        self.stop(error)

    def advance(self, total: int) -> None:
        """The call has read everything up to ``total``."""
        self.index = max(self.index, total)
        self._burst = 0


class Delivery:
    """Notices, and how many of the tokens may be delivered.

    Attributes:
        reader: the call that reads, or None when it has gone.
        withheld_by: the rules that keep the rest of the answer from every caller, if any do.
    """

    def __init__(self, request: AnsweredRequest, first: Row) -> None:
        self.reader: Reader | None = None
        self.withheld_by: tuple[str, ...] = ()
        self._request = request
        self._replaced: dict[str, int] = {}
        """Models whose answers are void, with their prompt tokens."""
        self._notices: list[Notice] = []
        self._restart_notice = 0
        """Index of the notice with which the current model began."""
        self._end: int | None = None
        """Number of tokens that are ever delivered; None: all."""
        self._use(first)

    def _use(self, attempt: Row) -> None:
        self._model, self._prompt_tokens = attempt.model, attempt.prompt_tokens
        self._row = attempt
        self._delivered = 0
        """The most tokens of this model that a caller has been given."""
        self._resume_token: ResumeToken | None = None
        """None: no caller was given any yet."""
        self._proven = 0
        """Tokens that the resume token stands for."""

    def text_before(self, index: int) -> str:
        """What callers see of the tokens before ``index``."""
        return self._row.transcript.text_before(index)

    def replaced(self, model: str) -> bool:
        """Whether ``model`` gave the answer before another one took over."""
        return model != self._model and model in self._replaced

    def started(self, model: str) -> Started:
        """The first event for a caller who holds a part of ``model``'s answer, or nothing."""
        started = self._request.started()
        started.model, started.prompt_tokens = self._model, self._prompt_tokens
        if self.replaced(model):
            started.model, started.prompt_tokens = model, self._replaced[model]
        return started

    def matches(self, token_ids: Sequence[VisibleToken], model: str) -> bool:
        """Whether ``token_ids`` of ``model`` are the beginning of the answer, as far as a caller can know it."""
        return self.replaced(model) or self._row.transcript.starts_with(token_ids)

    def attach(self, reader: Reader, model: str) -> None:
        """``reader`` reads from now on; what it holds is of ``model``, or of the current one when that is empty.

        It begins after the notices that it knows, or where another model took over.
        """
        assert self.reader is None, "one reader at a time"
        reader.notices = len(self._notices)
        if self.replaced(model):
            reader.index, reader.notices = 0, self._restart_notice
        reader.grew(reader.index, self._row.shown)
        self._delivered = max(self._delivered, reader.index)
        self.reader = reader

    def detach(self) -> Reader | None:
        """No call reads any more; returns the one that did."""
        reader, self.reader = self.reader, None
        return reader

    def wake(self) -> None:
        """There is something to read."""
        if self.reader is not None:
            self.reader.wake()

    def stop(self, error: SluiceError) -> None:
        """The answer failed with ``error``."""
        if self.reader is not None:
            self.reader.stop(error)

    def show_held_back(self) -> None:
        """Tokens that waited for a verdict or for the commit point may be read."""
        if self.reader is not None:
            self.reader.grew(self.reader.index, self._row.shown)
            self.reader.wake()

    def show_since(self, before: int) -> SlowReader | None:
        """More than ``before`` tokens may be read: wakes the reader. Returns an error when too many are unread."""
        total, reader = self._row.shown, self.reader
        if reader is None:
            return None
        if not reader.grew(before, total):
            reader.wake()
            return None
        unread = total - reader.index
        return SlowReader(f"{unread} tokens are unread; read faster, or resume with those received")

    def notify(self, notice: Notice) -> None:
        """Adds a notice for every reader."""
        self._notices.append(notice)

    def restart(self, attempt: Row, notice: Notice) -> None:
        """The answer is that of ``attempt`` from now on, as ``notice`` says; what was delivered is void."""
        self._restart_notice = len(self._notices)
        self._notices.append(notice)
        self._replaced[self._model] = self._prompt_tokens
        self._use(attempt)
        if self.reader is not None:
            self.reader.index = 0
        self.wake()

    def withhold(self, rules: tuple[str, ...]) -> None:
        """``rules`` object to the answer: only what a caller has been given already may be delivered again."""
        self.withheld_by, self._end = rules, self._delivered

    def read(
        self, reader: Reader, finished: Finished | None, *, hidden: bool
    ) -> list[GenerateResponse]:
        """What ``reader`` has not read, all tokens in one delta; ``hidden``: notices alone."""
        events = [GenerateResponse(notice=notice) for notice in self._notices[reader.notices :]]
        reader.notices = len(self._notices)
        if hidden:
            return events
        if not self._row.shown and finished is None:
            return events
        text = self._row.transcript
        delta = text.delta(reader.index, self._request.with_logprobs, self._end)
        if delta is not None:
            self._add_resume_token(delta)
            events.append(GenerateResponse(delta=delta))
        reader.advance(len(text.visible_ids[: self._end]))
        self._delivered = max(self._delivered, reader.index)
        if finished is not None:
            tail = text.tail_delta() if self._end is None else None
            events += [GenerateResponse(delta=tail)] if tail is not None else []
            events.append(GenerateResponse(finished=finished))
        return events

    def stored(self, finished: Finished) -> StoredAnswer:
        """All of an answer that has ended, as far as a caller may see it."""
        delta, lengths = self._row.transcript.whole(self._request.with_logprobs, self._end)
        self._add_resume_token(delta)
        replaced = [
            ReplacedModel(model=model, prompt_tokens=prompt_tokens)
            for model, prompt_tokens in self._replaced.items()
            if model != self._model
        ]
        return StoredAnswer(
            started=self.started(self._model),
            delta=delta,
            text_lengths=lengths,
            notices=self._notices,
            restart_notice=self._restart_notice,
            replaced=replaced,
            finished=finished,
        )

    def _add_resume_token(self, delta: Delta) -> None:
        """Every delta ends where the answer ends so far, so the token never has to go back."""
        if self._resume_token is None:
            self._resume_token = self._request.resume_token(self._model)
        end = delta.index + len(delta.token_ids)
        delta.resume_token = self._resume_token.after(
            self._row.transcript.visible_ids[self._proven : end]
        )
        self._proven = end
