"""The answer so far: every token, and what of it a caller sees.

Text is made token by token, so what shows after N tokens depends on the answer alone, not on frames. That is why a
resumed call, a take-over and a replay can start behind any delta and neither lose nor repeat a character. Under an
output filter text and tokens lag behind what came (`gateway/streaming/gate.py`); text always goes out with a token, so
that a place in the tokens is a place in the text.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import islice

from gateway.streaming.detokenizer import Detokenizer
from gateway.streaming.gate import Filter, Gate, Token
from gateway.streaming.stops import StopMatcher
from sluice.internal.v1.frame_pb2 import Logprobs
from sluice.v1.inference_pb2 import Delta, TokenLogprob, TokenLogprobs

TokenText = Callable[[int], str]
"""Text of one token alone."""


class Transcript:
    """Tokens, their text and their log-probabilities, in order.

    Attributes:
        token_ids: all tokens as they came, stop tokens included; never for a caller.
        shown_ids: what a caller sees of them.
        closed: no token will be added.
        blocked: the rules that ended the answer, if they did.
        contradicted: what shows is not what the caller holds.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        stop_token_ids: Collection[int],
        token_text: TokenText,
        output: Filter | None = None,
        held: Sequence[int] = (),
        alternatives: int | None = None,
    ) -> None:
        """``held``: the tokens that the caller has been shown before.

        ``alternatives``: how many alternatives per token a caller sees; None: all that come.
        """
        self.token_ids: list[int] = []
        self.shown_ids: list[int] = []
        self.closed = False
        self.blocked: tuple[str, ...] = ()
        self.contradicted = False
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._tail = ""
        self._lagging = ""
        """Text that waits for a token to go out with."""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._stop_token_ids = stop_token_ids
        self._token_text = token_text
        self._gate = Gate(output) if output is not None else None
        self._held = list(held)
        self._alternatives = alternatives

    @property
    def draft(self) -> str:
        """What shows of the answer so far."""
        return "".join(self._texts) + self._tail

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._matcher.found

    def append(self, token_id: int, logprobs: Logprobs | None = None) -> None:
        """Adds the next token."""
        assert not self.closed, "a closed transcript takes no tokens"
        self.token_ids.append(token_id)
        text = "" if token_id in self._stop_token_ids else self._detokenizer.push(token_id)
        if self._gate is None:
            self._show(token_id, logprobs, self._matcher.push(text))
        else:
            self._pass((token_id, logprobs), text, self._gate)
        if self.stop is not None or (self._gate is not None and self._gate.output.stopped):
            self.close(truncated=True)

    def close(self, truncated: bool = False) -> None:
        """Releases what was held back: the answer is complete.

        Args:
            truncated: the model did not end by itself; of a secret that was being said next to nothing shows.
        """
        if self.closed:
            return
        self.closed = True
        # In this order: the last characters may still complete a match or a stop string.
        text, gate = self._detokenizer.flush(), self._gate
        if gate is not None:
            gate.finish(text)
            text = gate.output.push(text) + gate.output.finish(truncated)
        self._tail = self._matcher.push(text) + self._matcher.flush()
        if gate is not None:
            self._show_all(gate.rest())
            self.blocked = () if self.stop is not None else gate.output.stopped
        self.contradicted |= self.stop is None and len(self.shown_ids) < len(self._held)

    def delta(self, start: int, with_logprobs: bool, end: int | None = None) -> Delta | None:
        """What shows from token ``start`` to ``end`` (None: of all), in one piece; None when there is nothing."""
        if start >= len(self.shown_ids[:end]):
            return None
        return Delta(
            text="".join(self._texts[start:end]),
            token_ids=self.shown_ids[start:end],
            index=start,
            logprobs=self._logprobs[start:end] if with_logprobs else (),
        )

    def tail(self) -> Delta | None:
        """Text that no later token released: it was held back until the answer was complete.

        A delta of its own, without tokens, so that a caller that reconnects at the very end can tell it from text
        that it has.
        """
        if not self._tail:
            return None
        return Delta(text=self._tail, index=len(self.shown_ids))

    def starts_with(self, token_ids: Sequence[int]) -> bool:
        """Whether ``token_ids`` are the beginning of the answer, as far as a caller can know it."""
        known = self.shown_ids + self._held[len(self.shown_ids) :]
        return known[: len(token_ids)] == list(token_ids)

    def _pass(self, token: Token, text: str, gate: Gate) -> None:
        """``token`` waits until the filter has decided about its ``text``."""
        self._lagging += self._matcher.push(gate.push(token, text))
        if text:
            self._show_all(gate.ready())

    def _show_all(self, tokens: Sequence[Token]) -> None:
        """Shows ``tokens``, which go out together; the last brings the text."""
        if not tokens:
            return
        for token_id, logprobs in tokens[:-1]:
            self._show(token_id, logprobs, "")
        text, self._lagging = self._lagging, ""
        self._show(*tokens[-1], text)

    def _show(self, token_id: int, logprobs: Logprobs | None, text: str) -> None:
        if self._held:
            index = len(self.shown_ids)
            self.contradicted |= index < len(self._held) and self._held[index] != token_id
        self.shown_ids.append(token_id)
        self._texts.append(text)
        self._logprobs.append(self._public(logprobs) if logprobs else TokenLogprobs())

    def _public(self, logprobs: Logprobs) -> TokenLogprobs:
        pairs = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=False)
        return TokenLogprobs(
            logprob=logprobs.logprob,
            top=[
                TokenLogprob(token_id=token_id, text=self._token_text(token_id), logprob=value)
                for token_id, value in islice(pairs, self._alternatives)
            ],
        )
