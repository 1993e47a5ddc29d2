"""Constrained decoding: the allowed next tokens of an answer that must match a JSON schema, a regex or a grammar.

llguidance compiles the constraints; it works on the model's tokens, not on text.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any, Final, NoReturn

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from model_workers.engine.protocol import Sampling
from sluice.constraint_reasons import TOO_COMPLEX
from sluice.constraints import (
    ConstraintInvalid,
    compile_grammar,
    is_dead_end,
    json_grammar,
    lark_grammar,
    regex_grammar,
)
from sluice.errors import InvalidRequest


class MatcherError(Exception):
    """A matcher cannot continue because of its constraint; the message says why, and what to do."""


CACHE_BYTES: Final = 256 << 20
"""Estimated size of the compiled grammars that are cached for further requests, least recently used evicted first.

About 20 of the largest schemas fit, or 250 small ones; compiling one anew takes milliseconds.
"""
_BASE_BYTES: Final = 1 << 20
_BYTES_OF_TEXT: Final = 100
_BYTES_OF_MASK: Final = 10 << 10
_STATES_BYTES_MAX: Final = 40 << 20
"""Memory of a grammar: a base, a factor of its text, and parser states that each mask adds up to a limit.

llguidance does not report it, so `CompiledGrammar.size_bytes` estimates it from these.
"""

SLOW_S: Final = 0.02
"""Compile time in seconds above which a grammar gets a spare copy, so that its states can be dropped."""

RESTART_TOKENS: Final = 32
"""Minimum number of tokens between two restarts of a matcher; more restarts would delay all sequences too much."""

_DEAD_END: Final = (
    "the answer ran into a dead end: no token continues what the constraint allowed so far; "
    "change it so that whatever it allows can be completed, or ask again with another seed"
)
_END: Final = "<|end of a constrained answer|>"


class ConstraintCompiler:
    """Creates the matchers for one tokenizer and caches compiled grammars. Thread-safe."""

    def __init__(self, tokenizer: LLTokenizer, cache_bytes: int = CACHE_BYTES) -> None:
        """Create a compiler; `tokenizer` has one token more than the model, its end of text: see `with_end`."""
        self._tokenizer = tokenizer
        self._cache_bytes = cache_bytes
        self._compiled: OrderedDict[tuple[str | None, ...], CompiledGrammar] = OrderedDict()
        self._lock = Lock()

    def open(self, sampling: Sampling) -> "TokenMatcher":
        """Return a matcher at the start of an answer.

        Raises:
            InvalidRequest: This worker cannot enforce the constraint.
        """
        key = (sampling.json_schema, sampling.regex, sampling.grammar)
        # Not locked: compiling takes long, and two threads that compile the same grammar do no harm.
        try:
            grammar = self._compiled.get(key)
            grammar = grammar or CompiledGrammar(_text_of(sampling), self._tokenizer)
            grammar.prepare()
        except ConstraintInvalid as error:
            message = f"cannot be enforced: {error}"
            raise InvalidRequest.of(sampling.constraint_field, message) from error
        matcher = TokenMatcher(grammar, sampling.stop_token_ids)
        with self._lock:
            self._compiled[key] = grammar
            self._compiled.move_to_end(key)
            # Sequences keep theirs until they end.
            while len(self._compiled) > 1 and self._size_bytes() > self._cache_bytes:
                self._compiled.popitem(last=False)
        return matcher

    @property
    def size_bytes(self) -> int:
        """Estimated size of the cached grammars."""
        with self._lock:
            return self._size_bytes()

    def _size_bytes(self) -> int:
        return sum(grammar.size_bytes for grammar in self._compiled.values())


def _text_of(sampling: Sampling) -> str:
    """Return the constraint as text for llguidance; raise ConstraintInvalid if there is none for it."""
    if sampling.json_schema is not None:
        return json_grammar(sampling.json_schema)
    if sampling.grammar is not None:
        return lark_grammar(sampling.grammar)
    assert sampling.regex is not None, "a sequence without a constraint has no matcher"
    return regex_grammar(sampling.regex)


class CompiledGrammar:
    """A grammar. Its matchers share cached parser states and the limit on their number.

    Attributes:
        masks: Number of masks that its matchers have computed since the states were dropped.
    """

    def __init__(self, text: str, tokenizer: LLTokenizer) -> None:
        """Compile `text`; raise ConstraintInvalid if that fails."""
        self.tokenizer = tokenizer
        self._text = text
        started_at = time.perf_counter()
        self._start = compile_grammar(text, tokenizer)
        self._is_slow = time.perf_counter() - started_at > SLOW_S
        self._spare: LLMatcher | None = None
        self.masks = 0

    @property
    def size_bytes(self) -> int:
        """Estimated size in memory, including the spare copy."""
        copies = 1 if self._spare is None else 2
        states = min(self.masks * _BYTES_OF_MASK, _STATES_BYTES_MAX)
        return _BASE_BYTES + copies * _BYTES_OF_TEXT * len(self._text) + states

    def prepare(self) -> None:
        """Compile a spare copy if `reset`, on the engine's thread, would take long without one."""
        if self._is_slow and self._spare is None:
            self._spare = compile_grammar(self._text, self.tokenizer)

    def matcher(self) -> LLMatcher:
        """Return a new matcher at the start of an answer."""
        return self._start.deep_copy()

    def reset(self) -> bool:
        """Drop the cached parser states; return False and keep them if that would take long."""
        self.masks = 0
        if not self._is_slow:
            self._start = compile_grammar(self._text, self.tokenizer)
            return True
        spare, self._spare = self._spare, None
        self._start = spare or self._start
        return spare is not None


class TokenMatcher:
    """The allowed continuations of one answer, owned by its sequence. Any stop token ends a complete answer.

    When the limit that sequences share is exceeded, the matcher restarts from the sequence's tokens. The sequence fails
    if that happens again within `RESTART_TOKENS`.
    """

    def __init__(self, grammar: CompiledGrammar, stop_token_ids: frozenset[int]) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher()
        self._end = grammar.tokenizer.eos_token
        self._stops = sorted(stop_token_ids)
        self._words = (max(self._end, *self._stops) >> 5) + 1
        self._token_ids: list[int] = []
        self._restarted_at = -RESTART_TOKENS
        self._ended = False

    def mask(self) -> NDArray[np.int32]:
        """Return the allowed next tokens: bit `t % 32` of word `t // 32`.

        Tokens beyond the last word are not allowed, and after a stop token none is.

        Raises:
            MatcherError: No token is allowed, or the mask cannot be computed within the limits.
        """
        words = np.zeros((1, self._words), np.int32)
        mask: NDArray[np.int32] = words[0]
        if self._ended:
            return mask
        self._grammar.masks += 1
        fill_next_token_bitmask(self._matcher, words)
        if self._restarted():
            fill_next_token_bitmask(self._matcher, words)
            if self._matcher.is_error():
                self._fail()
        may_end = _has(mask, self._end)
        _put(mask, [self._end], False)
        _put(mask, self._stops, may_end)
        if not mask.any():
            raise MatcherError(_DEAD_END)
        return mask

    def take(self, token_ids: Sequence[int]) -> int:
        """Append `token_ids` up to the first that is not allowed; return how many were appended.

        Raises:
            MatcherError: What follows exceeds the limits; the matcher is unusable.
        """
        accepted = 0
        for token_id in token_ids:
            if self._ended or not self._take(token_id):
                break
            accepted += 1
        return accepted

    def give_back(self, count: int) -> None:
        """Remove the last `count` tokens."""
        if self._ended and count:
            self._ended = False
            count -= 1
        if count:
            self._matcher.rollback(count)
            del self._token_ids[-count:]

    def _take(self, token_id: int) -> bool:
        if token_id in self._stops:
            self._ended = self._matcher.is_accepting()
            return self._ended
        if token_id >= self._end:
            return False
        accepted = self._matcher.try_consume_tokens([token_id])
        if self._restarted():
            accepted = self._matcher.try_consume_tokens([token_id])
            if self._matcher.is_error():
                self._fail()
        self._token_ids += [token_id] * accepted
        return accepted == 1

    def _restarted(self) -> bool:
        """Restart the matcher after an error, with the same tokens; return whether there was one.

        Raises:
            MatcherError: The error is a dead end, or the last restart was less than `RESTART_TOKENS` ago.
        """
        if not self._matcher.is_error():
            return False
        if is_dead_end(self._matcher):  # a new start would end there too
            self._fail()
        if len(self._token_ids) < self._restarted_at + RESTART_TOKENS:
            self._fail()
        self._restarted_at = len(self._token_ids)
        if not self._grammar.reset():
            self._fail()
        self._matcher = self._grammar.matcher()
        self._matcher.try_consume_tokens(self._token_ids)
        return True

    def _fail(self) -> NoReturn:
        if is_dead_end(self._matcher):
            raise MatcherError(_DEAD_END)
        raise MatcherError(TOO_COMPLEX)


def with_end(tokenizer: dict[str, Any]) -> LLTokenizer:
    """Return the tokenizer with one more token, which represents every stop token of a sequence in its masks."""
    added = tokenizer.get("added_tokens") or []
    ids = [*_vocabulary(tokenizer["model"]), *(token["id"] for token in added)]
    end = {
        "id": max(ids) + 1,
        "content": _END,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    changed = {**tokenizer, "added_tokens": [*added, end], "truncation": None, "padding": None}
    return LLTokenizer(json.dumps(changed), eos_token=end["id"])


def _vocabulary(model: dict[str, Any]) -> Sequence[int]:
    vocabulary = model["vocab"]
    # A unigram model lists its tokens in order.
    return list(vocabulary.values()) if isinstance(vocabulary, dict) else range(len(vocabulary))


def _has(words: NDArray[np.int32], token_id: int) -> bool:
    return bool(words[token_id >> 5] >> (token_id & 31) & 1)


def _put(words: NDArray[np.int32], token_ids: Sequence[int], value: bool) -> None:
    bits = words.view(np.uint32)
    for token_id in token_ids:
        bit = np.uint32(1 << (token_id & 31))
        if value:
            bits[token_id >> 5] |= bit
        else:
            bits[token_id >> 5] &= ~bit
