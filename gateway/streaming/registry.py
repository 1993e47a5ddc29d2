"""All live requests of this gateway; the one owner of them.

`open` an answer, or `compute` a row, and `take` what batchers say about them. Their rows are in the `Dispatch`.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from gateway.streaming.answer import Answer, AnsweredRequest, Fallback, Guards, SecondModel
from gateway.streaming.dispatch import Dispatch
from gateway.streaming.idempotency import Replay, ReplayCache, check_fingerprint
from gateway.streaming.row import Row
from gateway.streaming.row_result import RowRequest, RowResult
from sluice.errors import DeadlinePassed, InternalError, InvalidRequest, SluiceError
from sluice.internal.v1.frame_pb2 import TASK_END_RETURNED, Frame, FrameBundle
from sluice.wire.subjects import URGENT_CLASS
from sluice.wire.tokens import VisibleToken

_log = logging.getLogger(__name__)

FRAMES_AT_A_TIME: Final = 4
"""Each wakes a call, which makes text of the tokens and writes it."""
LATER_MAX: Final = 65_536
"""Frames that wait. Those of a full gateway are a tenth of it."""


class Registry:
    """Live answers and rows by request id, by row and by idempotency key, and replays of complete answers.

    Frames of urgent rows are taken at once, and so are those of rows that nobody knows: they are answered with a cancel
    and kept no longer. The owner takes the others in pieces (`take_more`), so that what a full batch brings does not
    hold up what arrives meanwhile.

    Attributes:
        dispatch: their rows.
        replays: complete answers, by idempotency key: `find` finds them.
    """

    def __init__(self, dispatch: Dispatch, replays: ReplayCache) -> None:
        self.dispatch = dispatch
        dispatch.on_failed = self.row_failed
        self.replays = replays
        self._rows: dict[str, RowResult] = {}
        """By every row of a live request, also those that it does not need any more."""
        self._by_key: dict[str, Answer] = {}
        self._later: deque[tuple[str, Frame]] = deque()

    def __len__(self) -> int:
        return len(set(self._rows.values()))

    def __iter__(self) -> Iterator[RowResult]:
        return iter(dict.fromkeys(self._rows.values()))

    def find(
        self, key: str, fingerprint: bytes, held: Sequence[VisibleToken], model: str, now: float
    ) -> Answer | Replay | None:
        """The live or complete answer that ``key`` names, or None when the request is new.

        Raises:
            IdempotencyConflict: the key belongs to another request.
            InvalidRequest: ``held``, of ``model`` when it is named, are not the beginning of its answer.
        """
        found = self._by_key.get(key) or self.replays.get(key, now)
        if found is None:
            return None
        known = found.request.fingerprint if isinstance(found, Answer) else found.fingerprint
        check_fingerprint(known, fingerprint)
        if not found.matches(held, model):
            raise InvalidRequest.of(
                "resume.token_ids", "are not the beginning of the answer that the key names"
            )
        return found

    def drop_replays(self, tenant: str) -> None:
        """Forgets the complete answers to ``tenant``."""
        self.replays.drop(lambda key: key.partition(" ")[0] == tenant)

    def live(self, key: str) -> Answer | None:
        """The live answer that ``key`` names."""
        return self._by_key.get(key)

    def open(
        self,
        request: AnsweredRequest,
        first: Row,
        cascade: SecondModel | None = None,
        guards: Guards | None = None,
        on_end: Callable[[Answer], None] = lambda _: None,
        fallback: Fallback | None = None,
    ) -> Answer:
        """Opens a new answer; its key is free (`find` said so).

        ``on_end`` is called once, when the answer has ended and is forgotten.
        """

        def ended() -> None:
            self._by_key.pop(request.key, None)
            try:
                if answer.finished_at is not None and request.key:
                    self.replays.put(request.key, answer.record(), answer.finished_at)
                on_end(answer)
            except Exception:  # what observes one request must not stop the frames of all others
                _log.exception("request %s: its end could not be recorded", answer.request_id)

        assert request.key not in self._by_key, "the key is free"
        answer = Answer(request, first, self.dispatch, self._rows, ended, cascade, guards, fallback)
        if request.key:
            self._by_key[request.key] = answer
        return answer

    def compute(self, request: RowRequest, row: Row, on_end: Callable[[], None]) -> RowResult:
        """Waits for the end of a row that nobody reads as a stream; ``on_end`` is called once, then."""
        return RowResult(request, row, self.dispatch, self._rows, on_end)

    def published(self, row_id: str) -> None:
        """A batcher has the task of a row."""
        if (result := self._rows.get(row_id)) is not None:
            result.published(row_id)

    def publish_failed(self, row_id: str, error: SluiceError) -> None:
        """The task of a row could not be sent, as far as is known: frames prove the contrary."""
        result = self._rows.get(row_id)
        if result is not None and not result.current.taken:
            result.row_failed(row_id, error)

    def row_failed(self, row_id: str, error: SluiceError) -> None:
        """A row cannot be answered."""
        if (result := self._rows.get(row_id)) is not None:
            result.row_failed(row_id, error)

    def fail_all(self, error: SluiceError) -> None:
        """Ends every live request with ``error``."""
        for result in self:
            result.fail(error)

    def take(self, bundle: FrameBundle, now: float) -> bool:
        """Takes what a batcher says; whether `take_more` has something to do."""
        batcher, dispatch = bundle.batcher, self.dispatch
        dispatch.heard(batcher, now)
        for ref in bundle.pending:
            if dispatch.accepts(batcher, ref.request_id, ref.attempt, now, waits=True):
                self.published(ref.request_id)
        dispatch.unknown(batcher, bundle.unknown, now)
        for frame in bundle.frames:
            # A person waits for such a row's tokens; its other rows, which only count, keep their order.
            result = self._rows.get(frame.request_id)
            if result is None or result.request.priority_class == URGENT_CLASS:
                self._take_frame(batcher, frame, now)
            elif len(self._later) < LATER_MAX:  # else it is lost, and asked for again
                self._later.append((batcher, frame))
        return bool(self._later)

    def take_more(self, now: float) -> bool:
        """Takes the next frames of rows that are not urgent; whether there are more."""
        for _ in range(min(FRAMES_AT_A_TIME, len(self._later))):
            self._take_frame(*self._later.popleft(), now)
        return bool(self._later)

    def _take_frame(self, batcher: str, frame: Frame, now: float) -> None:
        row_id, dispatch = frame.request_id, self.dispatch
        if frame.final.end == TASK_END_RETURNED:
            dispatch.returned(batcher, frame, now)
            return
        # Frames of a row that its request does not need any more still count as usage.
        waits = row_id in dispatch
        if dispatch.accepts(batcher, row_id, frame.attempt, now) or not waits:
            self.accept(frame, now)

    def accept(self, frame: Frame, now: float) -> None:
        """Gives ``frame`` to the request of its row."""
        result = self._rows.get(frame.request_id)
        if result is None:
            return
        try:
            result.accept(frame, now)
        except Exception:  # one bad row must not stop the frames of all others
            _log.exception("request %s: a frame could not be processed", frame.request_id)
            error = InternalError("the answer could not be assembled")
            result.row_failed(frame.request_id, error)

    def tick(self, now: float, *, connected: bool = True) -> None:
        """Ends what is past its deadline, asks about silent rows, evicts old replays.

        ``connected``: whether batchers can be heard.
        """
        for result in self:
            if now >= result.request.deadline:
                late = "the deadline passed before the answer was complete"
                result.fail(DeadlinePassed(late))
        if connected:
            self.dispatch.tick(now)
        else:
            self.dispatch.restart(now)
        self.replays.expire(now)
