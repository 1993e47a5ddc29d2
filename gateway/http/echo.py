"""Prompts that are repeated before their answers in /v1/completions (`echo`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sluice.openai.answers import joined, text_logprobs
from sluice.v1 import inference_pb2 as pb

Json = dict[str, Any]


@dataclass(frozen=True)
class Echo:
    """A prompt before its answer.

    Attributes:
        text: Text of the prompt.
        tokens: Tokens of the prompt with their log-probabilities; empty if these are not asked for.
        unscored: Number of first tokens that have no log-probability.
    """

    text: str
    tokens: Sequence[pb.TokenLogprobs] = ()
    unscored: int = 0

    def whole(self, text: str, entries: Sequence[pb.TokenLogprobs]) -> Json:
        """Return text and log-probabilities of a choice: the prompt, then the answer `text`."""
        answer = self.answer(text, entries, len(self.text))
        logprobs = joined(self.prompt()["logprobs"], answer["logprobs"])
        return {"text": self.text + text, "logprobs": logprobs}

    def prompt(self) -> Json:
        """Return text and log-probabilities of the prompt alone."""
        logprobs = text_logprobs(self.tokens, self.text, 0, self.unscored) if self.tokens else None
        return {"text": self.text, "logprobs": logprobs}

    def answer(self, text: str, entries: Sequence[pb.TokenLogprobs], offset: int) -> Json:
        """Return text and log-probabilities of a piece of the answer that begins `offset` characters into the choice.

        The token that ends the answer keeps its entry: readers of a prompt's log-probabilities count from the end.
        """
        return {"text": text, "logprobs": text_logprobs(entries, text, offset) if entries else None}
