"""One model's work on an answer: a row, the tokens that came of it, and what they show."""

from dataclasses import dataclass, field

from gateway.safety.inspector import AnswerInspection
from gateway.streaming.assembler import Assembler, Taken
from gateway.streaming.transcript import Transcript
from sluice.errors import SluiceError
from sluice.internal.v1.frame_pb2 import BatchInfo, Final, Frame
from sluice.v1.inference_pb2 import (
    FINISH_REASON_CONTENT_FILTER,
    FINISH_REASON_STOP,
    FINISH_REASON_STOP_SEQUENCE,
    FinishReason,
    Usage,
)


@dataclass
class Leg:
    """A row of an answer.

    Attributes:
        row_id: names the row on the wires; the first leg's is the request id.
        model: who computes it.
        prompt_tokens: in this model's tokens.
        transcript: what came.
        assembler: order and attempts of its frames.
        answer: what the safety policy does about it; its filter is in the transcript.
        final: how the row ended; None until it has.
        stopped: a stop string or the safety policy ended the answer; the row itself may go on.
        handed_over: why another model went on instead; empty while it is the last leg.
        kept: why it was kept although in doubt.
        alone: why the second model, which should have begun together with this one, did not.
        unused: why its work was thrown away; empty for what was the answer at some time.
        error: what went wrong with it, where another leg answered.
    """

    row_id: str
    model: str
    prompt_tokens: int
    transcript: Transcript
    assembler: Assembler
    answer: AnswerInspection | None = None
    final: Final | None = field(default=None, compare=False)
    stopped: bool = False
    handed_over: str = ""
    kept: str = ""
    alone: str = ""
    unused: str = ""
    error: SluiceError | None = None

    @property
    def said(self) -> str:
        """The answer so far as the model said it: with placeholders, and before anything is taken out."""
        return self.transcript.draft if self.answer is None else self.answer.filter.raw

    @property
    def usage(self) -> Usage:
        """Tokens of prompt and answer."""
        answered = len(self.transcript.token_ids)
        return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=answered)

    @property
    def batch(self) -> BatchInfo | None:
        """The batch that the row was sent in last; None until the row has ended."""
        if self.final is None or not self.final.HasField("batch"):
            return None
        return self.final.batch

    def take(self, frame: Frame, now: float) -> Taken:
        """Adds what ``frame`` brings."""
        taken = self.assembler.take(frame, now)
        self._append(taken)
        if taken.final is not None:
            self.final = taken.final
        return taken

    def close(self, reason: "FinishReason.ValueType") -> "FinishReason.ValueType":
        """No token comes any more, as the row ended with ``reason``. Returns why the answer ended."""
        self.transcript.close(truncated=reason != FINISH_REASON_STOP)
        # The held-back end may have completed either.
        if self.transcript.stop is not None:
            return FINISH_REASON_STOP_SEQUENCE
        return FINISH_REASON_CONTENT_FILTER if self.transcript.blocked else reason

    def _append(self, taken: Taken) -> None:
        transcript = self.transcript
        complete = transcript.closed
        for position, token_id in enumerate(taken.token_ids):
            if transcript.closed:
                break
            logprobs = taken.logprobs[position] if position < len(taken.logprobs) else None
            transcript.append(token_id, logprobs)
        self.stopped |= transcript.closed and not complete
