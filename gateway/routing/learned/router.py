"""The learned router: a prompt in, what the large model is worth out, in a fraction of a millisecond.

Load one with `artefact.load`. It never changes; a newer one takes its place as a whole.
"""

from dataclasses import dataclass

import numpy as np

from gateway.routing.learned import answer, features
from gateway.routing.learned.head import Head, Score
from gateway.routing.learned.text import parse


class NoCascadeHead(ValueError):
    """The router has learned from prompts alone and cannot judge answers."""


@dataclass(frozen=True)
class LearnedRouter:
    """Heads for prompts, and for prompts with the small model's answer."""

    prompts: Head
    cascade: Head | None
    version: str = ""
    """Hash of the artefact it came from; empty for one just trained."""

    def score(self, prompt: str) -> Score:
        """What the large model is worth for ``prompt``, before any model has answered."""
        text = parse(prompt)
        return self.prompts.score(features.describe(text), text)

    def score_with_answer(self, prompt: str, weak_response: str) -> Score:
        """What the large model is worth once the small model has answered.

        Raises:
            NoCascadeHead: it was trained without answers.
        """
        if self.cascade is None:
            raise NoCascadeHead(
                "the router was trained without weak_response: it has no cascade head"
            )
        text = parse(prompt)
        row = np.concatenate((features.describe(text), answer.describe(prompt, weak_response)))
        return self.cascade.score(row, text)
