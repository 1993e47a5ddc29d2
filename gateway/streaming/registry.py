"""What is computed in this gateway: results by run, answers by idempotency key, and what batchers send of them.

`Registry.take` passes a `ResultCollector` what batchers send; `gateway.streaming.dispatch` sends its runs. A result
that a caller reads while it is computed, and that several runs may work on, is an
`gateway.streaming.answer_stream.AnswerStream`.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from gateway.streaming.dispatch import Dispatch
from gateway.streaming.idempotency import Replay, ReplayCache, check_fingerprint
from gateway.streaming.model_run import ResultCollector
from sluice.errors import DeadlinePassed, InternalError, InvalidRequest, SluiceError
from sluice.internal.v1.frame_pb2 import TASK_END_RETURNED, Frame, FrameBundle
from sluice.wire.tokens import VisibleToken

if TYPE_CHECKING:
    from gateway.streaming.answer_stream import AnswerStream

logger = logging.getLogger(__name__)

FRAMES_PER_TURN: Final = 4
"""Frames of less urgent runs in a turn of the event loop: each wakes a call, which makes text and writes it."""
DEFERRED_MAX: Final = 65_536
"""Frames that wait for their turn; those of a full gateway are a tenth of it. More are dropped and requested again."""


class Registry:
    """Live answers and results, and replays of complete answers.

    Frames of interactive runs are taken at once, and so are those of unknown runs: they are answered with a cancel. The
    owner takes the others in pieces (`take_deferred`), so that what a full batch brings does not hold up what arrives
    meanwhile.

    Attributes:
        dispatch: sends their runs.
        replays: complete answers, by idempotency key: `find` finds them.
        by_run: live results, by every run, also those that they do not need any more.
        by_key: live answers, by idempotency key.
    """

    def __init__(self, dispatch: Dispatch, replays: ReplayCache) -> None:
        self.dispatch = dispatch
        self.replays = replays
        self.by_run: dict[str, ResultCollector] = {}
        self.by_key: dict[str, AnswerStream] = {}
        self._deferred: deque[tuple[str, Frame]] = deque()
        """Batcher and frame."""

    def __len__(self) -> int:
        return len(set(self.by_run.values()))

    def __iter__(self) -> Iterator[ResultCollector]:
        return iter(dict.fromkeys(self.by_run.values()))

    def find(
        self, key: str, fingerprint: bytes, held_ids: Sequence[VisibleToken], model: str, now: float
    ) -> "AnswerStream | Replay | None":
        """Return the live or complete answer that `key` names, or None when the request is new.

        Raises:
            IdempotencyConflict: the key belongs to another request.
            InvalidRequest: the tokens that the caller has, `held_ids` of `model`, are not the beginning of the answer.
        """
        answer = self.by_key.get(key) or self.replays.get(key, now)
        if answer is None:
            return None
        check_fingerprint(answer.fingerprint, fingerprint)
        if not answer.matches(held_ids, model):
            raise InvalidRequest.of(
                "resume.token_ids", "are not the beginning of the answer that the key names"
            )
        return answer

    def drop_replays(self, tenant: str) -> None:
        """Drop the complete answers to `tenant`."""
        self.replays.drop(lambda key: key.partition(" ")[0] == tenant)

    # What batchers send.

    def take(self, bundle: FrameBundle, now: float) -> bool:
        """Take a bundle of a batcher; return whether frames wait for `take_deferred`."""
        batcher, dispatch = bundle.batcher, self.dispatch
        dispatch.note_message(batcher, now)
        for ref in bundle.pending:
            if dispatch.accepts(batcher, ref.request_id, ref.attempt, now, waits=True):
                self.accept_task(ref.request_id)
        dispatch.take_unknown(batcher, bundle.unknown, now)
        self._end_failed()
        for frame in bundle.frames:
            # A person waits for the tokens of an interactive run; the other runs keep their order among themselves.
            result = self.by_run.get(frame.request_id)
            if result is None or result.current.is_urgent:
                self._take_frame(batcher, frame, now)
            elif len(self._deferred) < DEFERRED_MAX:
                self._deferred.append((batcher, frame))
        return bool(self._deferred)

    def take_deferred(self, now: float) -> bool:
        """Take the next deferred frames; return whether there are more."""
        for _ in range(min(FRAMES_PER_TURN, len(self._deferred))):
            self._take_frame(*self._deferred.popleft(), now)
        return bool(self._deferred)

    def _take_frame(self, batcher: str, frame: Frame, now: float) -> None:
        run_id, dispatch = frame.request_id, self.dispatch
        if frame.final.end == TASK_END_RETURNED:
            dispatch.take_returned(batcher, frame, now)
            self._end_failed()
            return
        # Frames of a run that its request does not need any more still count as usage.
        is_needed = run_id in dispatch
        if dispatch.accepts(batcher, run_id, frame.attempt, now) or not is_needed:
            self.accept(frame, now)

    def lose_batcher(self, batcher: str, now: float) -> None:
        """Recover all runs of a batcher that has no subscription."""
        self.dispatch.lose_batcher(batcher, now)
        self._end_failed()

    # Runs.

    def accept_task(self, run_id: str) -> None:
        """Note that a batcher has the task of a run."""
        if (result := self.by_run.get(run_id)) is not None:
            result.accept_task(run_id)

    def accept(self, frame: Frame, now: float) -> None:
        """Give `frame` to the request of its run."""
        result = self.by_run.get(frame.request_id)
        if result is None:
            return
        try:
            result.accept(frame, now)
        except Exception:  # one bad run must not stop the frames of all others
            logger.exception("processing a frame of request %s failed", frame.request_id)
            error = InternalError("the answer could not be assembled")
            result.fail_run(frame.request_id, error)

    def fail_send(self, run_id: str, error: SluiceError) -> None:
        """Fail a run whose task could not be sent, unless a batcher has or had it."""
        result = self.by_run.get(run_id)
        if result is not None and not result.current.was_accepted:
            result.fail_run(run_id, error)

    def _end_failed(self) -> None:
        for run, error in self.dispatch.take_failed():
            if (result := self.by_run.get(run.run_id)) is not None:
                result.fail_run(run.run_id, error)

    # Time.

    def tick(self, now: float, *, is_connected: bool = True) -> None:
        """End what is past its deadline, query silent runs, evict old replays.

        `is_connected`: whether messages of batchers can arrive.
        """
        for result in self:
            if now >= result.current.deadline:
                message = "the deadline passed before the answer was complete"
                result.fail(DeadlinePassed(message))
        if is_connected:
            self.dispatch.tick(now)
            self._end_failed()
        else:
            self.dispatch.restart(now)
        self.replays.expire(now)

    def fail_all(self, error: SluiceError) -> None:
        """End every live request with `error`."""
        for result in self:
            result.fail(error)
