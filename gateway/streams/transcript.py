"""The answer so far: every token with the text that it released.

Text is made token by token, so what is released after N tokens depends on those tokens alone, not on frames. That is
why a resumed call, a take-over and a replay can start behind any token and neither lose nor repeat a character.
"""

from collections.abc import Callable, Collection, Sequence

from gateway.streams.detokenizer import Detokenizer
from gateway.streams.stops import StopMatcher
from sluice.internal.v1.frame_pb2 import Logprobs
from sluice.v1.inference_pb2 import Delta, TokenLogprob, TokenLogprobs

TokenText = Callable[[int], str]
"""Text of one token alone."""


class Transcript:
    """Tokens, their text and their log-probabilities, in order.

    Attributes:
        token_ids: all tokens, stop tokens included.
        closed: no token will be added.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        stop_token_ids: Collection[int],
        token_text: TokenText,
    ) -> None:
        self.token_ids: list[int] = []
        self.closed = False
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._tail = ""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._stop_token_ids = stop_token_ids
        self._token_text = token_text

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._matcher.found

    def append(self, token_id: int, logprobs: Logprobs | None = None) -> None:
        """Adds the next token."""
        assert not self.closed, "a closed transcript takes no tokens"
        self.token_ids.append(token_id)
        text = "" if token_id in self._stop_token_ids else self._detokenizer.push(token_id)
        self._texts.append(self._matcher.push(text))
        self._logprobs.append(self._public(logprobs) if logprobs else TokenLogprobs())
        if self.stop is not None:
            self.closed = True

    def close(self) -> None:
        """Releases what was held back: the answer is complete."""
        if self.closed:
            return
        self.closed = True
        # In this order: the last characters may still complete a stop string.
        self._tail = self._matcher.push(self._detokenizer.flush())
        self._tail += self._matcher.flush()

    def delta(self, start: int, with_logprobs: bool) -> Delta | None:
        """Everything behind the first ``start`` tokens, in one piece; None when there is nothing."""
        if start >= len(self.token_ids):
            return None
        return Delta(
            text="".join(self._texts[start:]),
            token_ids=self.token_ids[start:],
            index=start,
            logprobs=self._logprobs[start:] if with_logprobs else (),
        )

    def tail(self) -> Delta | None:
        """Text that no later token released: it was held back until the answer was complete.

        A delta of its own, without tokens, so that a caller that reconnects at the very end can tell it from text
        that it has.
        """
        if not self._tail:
            return None
        return Delta(text=self._tail, index=len(self.token_ids))

    def starts_with(self, token_ids: Sequence[int]) -> bool:
        """Whether ``token_ids`` are the beginning of the answer."""
        return self.token_ids[: len(token_ids)] == list(token_ids)

    def _public(self, logprobs: Logprobs) -> TokenLogprobs:
        return TokenLogprobs(
            logprob=logprobs.logprob,
            top=[
                TokenLogprob(token_id=token_id, text=self._token_text(token_id), logprob=value)
                for token_id, value in zip(
                    logprobs.top_token_ids, logprobs.top_logprobs, strict=False
                )
            ],
        )
