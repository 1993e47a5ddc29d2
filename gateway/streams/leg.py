"""One model's work on an answer: a row, the tokens that came of it, and what they show."""

from dataclasses import dataclass, field

from gateway.safety.answer import AnswerInspection
from gateway.streams.assembler import Assembler
from gateway.streams.transcript import Transcript
from sluice.internal.v1.frame_pb2 import BatchInfo


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
        batch: the batch that the row was sent in last; None until the row has ended.
        handed_over: why another model went on instead; empty while it is the last leg.
        kept: why it was kept although in doubt.
    """

    row_id: str
    model: str
    prompt_tokens: int
    transcript: Transcript
    assembler: Assembler
    answer: AnswerInspection | None = None
    batch: BatchInfo | None = field(default=None, compare=False)
    handed_over: str = ""
    kept: str = ""

    @property
    def said(self) -> str:
        """The answer so far as the model said it: with placeholders, and before anything is taken out."""
        return self.transcript.draft if self.answer is None else self.answer.filter.raw
