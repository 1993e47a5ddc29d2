"""Says which models have room for a request: prompt and answer together must fit into a model's context.

How many tokens a prompt has is known only once a model's tokenizer has encoded it. Until then its characters give a
lower bound, so a model that may fit is tried, and the request is routed again when it does not.
"""

import math
from collections.abc import Collection, Sequence
from typing import Final

from gateway.admission.prompts import prompt_too_long
from gateway.models.catalog import Catalog
from sluice.errors import PromptTooLong

MIN_ANSWER_TOKENS: Final = 16
"""Room for an answer whose length the caller does not limit, in tokens: fewer are rarely an answer."""


class ContextFit:
    """What is known of the room that each model has for one request."""

    def __init__(
        self,
        catalog: Catalog,
        texts: Sequence[str],
        max_tokens: int,
        excluded: Collection[str] = (),
    ) -> None:
        """Know nothing but the size of the texts.

        Args:
            catalog: The models.
            texts: Texts of the prompt, as models may see them.
            max_tokens: Longest answer; 0 if the caller names no limit.
            excluded: Models that answer only where the request or the policy names them.
        """
        self._catalog = catalog
        self._chars = sum(map(len, texts))
        self._max_tokens = max_tokens
        self._excluded = excluded
        self._tokens: dict[str, int] = {}
        """Length of the prompt, by the models that have encoded it."""
        self._roomiest = ""
        """The model that answers although it has less room than wanted, because no other has more."""

    def fits(self, model: str) -> bool:
        """Return whether `model` may have room for the prompt and the answer that is wanted."""
        if model not in self._catalog.reading or model in self._excluded:
            return False
        wanted = min(self._max_tokens or MIN_ANSWER_TOKENS, self._catalog[model].max_answer_tokens)
        return self._room(model) >= (1 if model == self._roomiest else wanted)

    def note(self, model: str, prompt_tokens: int) -> None:
        """Record that the prompt has `prompt_tokens` tokens of `model`."""
        self._tokens[model] = prompt_tokens

    def relax(self) -> None:
        """Accept a shorter answer, of the model with the most room, when no model has room for the one wanted.

        Raises:
            PromptTooLong: no model has room for a single token of an answer; names the largest context.
        """
        candidates = [name for name in self._catalog.reading if name not in self._excluded]
        self._roomiest = max(candidates, key=self._room)
        if self._room(self._roomiest) < 1:
            raise self._too_long(candidates)

    def _too_long(self, candidates: Sequence[str]) -> PromptTooLong:
        largest = max(candidates, key=lambda name: self._catalog[name].context_tokens)
        tokens, is_exact = self._least_tokens(largest), largest in self._tokens
        if is_exact:
            tokens = self._tokens[largest]
        size = f"{tokens}" if is_exact else f"at least {tokens}"
        return prompt_too_long(self._catalog[largest], size, tokens)

    def _room(self, model: str) -> int:
        """Return the most tokens that an answer of `model` may have."""
        tokens = self._tokens.get(model, self._least_tokens(model))
        return self._catalog[model].context_tokens - tokens

    def _least_tokens(self, model: str) -> int:
        return math.ceil(self._chars / self._catalog[model].tokenizer.token_chars_max)
