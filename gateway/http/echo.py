"""Prompts that stand in front of their answers in /v1/completions (`echo`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sluice.openai.answers import joined, text_logprobs
from sluice.v1 import inference_pb2 as pb

Json = dict[str, Any]


@dataclass(frozen=True)
class Echo:
    """A prompt in front of its answer.

    Attributes:
        text: of the prompt.
        tokens: their log-probabilities, where they are wanted.
        unscored: how many of them, the first, have none.
    """

    text: str
    tokens: Sequence[pb.TokenLogprobs] = ()
    unscored: int = 0

    def whole(self, text: str, entries: Sequence[pb.TokenLogprobs]) -> Json:
        """Return text and log-probabilities of a choice, the prompt and the answer ``text``."""
        answer = self.answer(text, entries, len(self.text))
        logprobs = joined(self.prompt()["logprobs"], answer["logprobs"])
        return {"text": self.text + text, "logprobs": logprobs}

    def prompt(self) -> Json:
        """Return the part of `whole` that is the prompt."""
        logged = text_logprobs(self.tokens, self.text, 0, self.unscored) if self.tokens else None
        return {"text": self.text, "logprobs": logged}

    def answer(self, text: str, entries: Sequence[pb.TokenLogprobs], offset: int) -> Json:
        """Return a part of the answer, which begins ``offset`` characters into the choice.

        The token that ends the answer has an entry: readers of a prompt's log-probabilities count tokens from the end.
        """
        return {"text": text, "logprobs": text_logprobs(entries, text, offset) if entries else None}
