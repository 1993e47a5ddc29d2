"""What callers may see of one answer, who reads it now, and what has been given out."""

from gateway.streaming.reader import Reader
from gateway.streaming.transcript import Transcript
from sluice.errors import SlowReader
from sluice.v1.inference_pb2 import Finished, GenerateResponse, Notice


class Showing:
    """Notices, and how much of the tokens may go out.

    Attributes:
        reader: the call that reads, or None when it has gone.
        withheld_by: the rules that keep the rest of the answer from every caller, if some do.
    """

    def __init__(self, with_logprobs: bool) -> None:
        self.reader: Reader | None = None
        self.withheld_by: tuple[str, ...] = ()
        self._with_logprobs = with_logprobs
        self._notices: list[Notice] = []
        self._anew_at = 0
        """The notice with which the present leg began."""
        self._given_tokens = 0
        """The most that a caller has been given of the leg."""
        self._end: int | None = None
        """Tokens that are ever shown; None: all."""

    def attach(self, reader: Reader, transcript: Transcript, *, anew: bool) -> None:
        """``reader`` reads from now on; ``anew``: what it holds is of an earlier leg, and void."""
        assert self.reader is None, "one reader at a time"
        reader.notices = len(self._notices)
        if anew:
            reader.index = 0
            reader.notices = self._anew_at
        reader.attach(len(transcript.shown_ids))
        self._given_tokens = max(self._given_tokens, reader.index)
        self.reader = reader

    def detach(self) -> Reader | None:
        """The call that reads, which does so no more."""
        reader, self.reader = self.reader, None
        return reader

    def wake(self) -> None:
        """There is something to read."""
        if self.reader is not None:
            self.reader.wake()

    def release(self, transcript: Transcript) -> None:
        """What waited for a verdict may be read: that it waited is not the reader's fault."""
        if self.reader is not None:
            self.reader.grew(self.reader.index, len(transcript.shown_ids))
            self.reader.wake()

    def grew(self, before: int, transcript: Transcript) -> SlowReader | None:
        """More than ``before`` tokens may be read: wakes the reader; the error when more waits for it than may."""
        total, reader = len(transcript.shown_ids), self.reader
        if reader is None:
            return None
        reader.grew(before, total)
        if not reader.too_slow(total):
            reader.wake()
            return None
        unread = total - reader.index
        return SlowReader(
            f"{unread} tokens wait unread; read faster, or resume with those received"
        )

    def notify(self, notice: Notice) -> None:
        """Tells every reader."""
        self._notices.append(notice)

    def begin_anew(self, notice: Notice) -> None:
        """Another leg answers, as ``notice`` says: nothing of it has been given to anybody."""
        self._anew_at = len(self._notices)
        self._notices.append(notice)
        self._given_tokens = 0
        if self.reader is not None:
            self.reader.index = 0
        self.wake()

    def withhold(self, rules: tuple[str, ...]) -> None:
        """``rules`` object to the answer: nothing goes out but what a caller has been given."""
        self.withheld_by, self._end = rules, self._given_tokens

    def events(
        self, reader: Reader, transcript: Transcript, finished: Finished | None, *, silent: bool
    ) -> list[GenerateResponse]:
        """What ``reader`` has not had, everything that waits in one delta; ``silent``: notices alone."""
        events = [GenerateResponse(notice=notice) for notice in self._notices[reader.notices :]]
        reader.notices = len(self._notices)
        if silent:
            return events
        delta = transcript.delta(reader.index, self._with_logprobs, self._end)
        if delta is not None:
            events.append(GenerateResponse(delta=delta))
        reader.took(max(reader.index, len(transcript.shown_ids[: self._end])))
        self._given_tokens = max(self._given_tokens, reader.index)
        if finished is not None:
            tail = transcript.tail() if self._end is None else None
            events += [GenerateResponse(delta=tail)] if tail is not None else []
            events.append(GenerateResponse(finished=finished))
        return events
