"""The result of a run that nobody reads as a stream: an embedding, a guard's verdict, a shadow, a chunk of audio.

An `gateway.streaming.answer_stream.AnswerStream` is a result that a caller reads while it is computed, and that several
runs may work on.
"""

from collections.abc import Callable, MutableMapping
from typing import Protocol

from gateway.streaming.dispatch import Dispatch
from gateway.streaming.model_run import ModelRun
from gateway.streaming.state import ENDED, StreamState
from sluice.errors import SluiceError
from sluice.internal.v1.frame_pb2 import Frame
from sluice.v1.inference_pb2 import FinishReason


class RunRequest(Protocol):
    """The request that a run is for: whose it is, and how long it may take.

    Attributes:
        arrived_at: monotonic seconds.
        deadline: when it fails, monotonic seconds.
    """

    tenant: str
    priority_class: str
    arrived_at: float
    deadline: float


class ResultCollector:
    """Collects the result of a run.

    Attributes:
        request: what it is for.
        request_id: its name, which is that of its first run.
        state: how far it is.
        error: why it failed, in state FAILED.
        reason: why it is complete, in state FINISHED.
        runs: that worked on it, in the order in which they began.
        current: the last of them, whose result it is.
    """

    def __init__(
        self,
        request: RunRequest,
        run: ModelRun,
        dispatch: Dispatch,
        live: "MutableMapping[str, ResultCollector]",
        on_end: Callable[[], None],
    ) -> None:
        """Wait for the result of a run.

        Args:
            request: what it is for.
            run: which is sent next.
            dispatch: sends its runs.
            live: has an entry for every run of a result that has not ended.
            on_end: called once, with the end.
        """
        self.state = StreamState.PUBLISHING
        self.error: SluiceError | None = None
        self.reason: FinishReason.ValueType | None = None
        self.request = request
        self.request_id = run.run_id
        self.runs: list[ModelRun] = []
        self._dispatch = dispatch
        self._live = live
        self._on_end = on_end
        self._add_run(run)

    def _add_run(self, run: ModelRun) -> None:
        self.current = run
        self.runs.append(run)
        assert run.run_id not in self._live, "run ids are unique"
        self._live[run.run_id] = self

    @property
    def has_ended(self) -> bool:
        """Whether it is complete or failed."""
        return self.state in ENDED

    @property
    def was_accepted(self) -> bool:
        """Whether a batcher had any of its runs: only then was something computed."""
        return any(run.was_accepted for run in self.runs)

    @property
    def has_run_ended(self) -> bool:
        """Whether no run is computed for it any more."""
        return self.has_ended or self.state is StreamState.CHECKING

    def accept_task(self, run_id: str) -> None:
        """Note that a batcher has the task of a run."""
        run = self._run(run_id)
        run.was_accepted = True
        if run is self.current and self.state is StreamState.PUBLISHING:
            self._move(StreamState.WAITING)

    def _run(self, run_id: str) -> ModelRun:
        return next(run for run in self.runs if run.run_id == run_id)

    def fail_run(self, run_id: str, error: SluiceError) -> None:
        """End with `error` because a run cannot be answered, if it is the current one."""
        if run_id == self.current.run_id:
            self.fail(error)

    def accept(self, frame: Frame, now: float) -> None:
        """Add what is new in `frame`."""
        run = self.current
        accepted = run.accept(frame, now)
        if accepted.token_ids and self.state is not StreamState.STREAMING:
            self._move(StreamState.STREAMING)
        if self._end_with_run(now):
            self._dispatch.release(run)
        elif accepted.has_gap:
            self._dispatch.query(run)

    def _end_with_run(self, now: float) -> bool:
        """End if the current run has ended, and return whether it has."""
        outcome = self.current.outcome
        if isinstance(outcome, SluiceError):
            self._end(outcome)
        elif outcome is not None:
            self.finish(outcome, now)
        return outcome is not None

    def finish(self, reason: "FinishReason.ValueType", now: float) -> None:
        """End complete: the run ended with `reason`."""
        self._end(self.current.close(reason))

    def fail(self, error: SluiceError) -> None:
        """Cancel the run and end with `error`, unless it has ended."""
        if not self.has_ended:
            self._cancel_run()
            self._end(error)

    def _cancel_run(self) -> None:
        if not self.has_run_ended:
            self._dispatch.release(self.current)

    def _end(self, outcome: "FinishReason.ValueType | SluiceError") -> None:
        if isinstance(outcome, SluiceError):
            self.error = outcome
            self._move(StreamState.FAILED)
        else:
            self.reason = outcome
            self._move(StreamState.FINISHED)
        for run in self.runs:
            del self._live[run.run_id]
        # It refers to the caller's call, which refers to this: without a circle no garbage collection is needed.
        on_end, self._on_end = self._on_end, _on_second_end
        on_end()

    def _move(self, target: StreamState) -> None:
        assert not self.has_ended, "an end is final"
        self.state = target


def _on_second_end() -> None:
    raise AssertionError("a result ends once")
