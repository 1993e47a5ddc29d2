"""The answer so far: every token, and what of it a caller sees.

Text is made token by token, so what is visible after N tokens depends on the answer alone, not on how it was cut into
frames. That is why a resumed call, a takeover and a replay can start behind any delta and neither lose nor repeat a
character.

An output filter delays tokens and text. A token is released when the filter has decided about every character of it;
the tokens that make up one character are released together. A token of which any character is hidden is shown as
None, so that indexes stay and ids never reveal what the text hides. Text always leaves with a token, so
that an index of a token is a place in the text.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Final

from gateway.safety.findings import Finding
from gateway.safety.output.filter import OutputFilter
from gateway.safety.output.windows import Window
from gateway.streaming.detokenizer import Detokenizer
from gateway.streaming.stops import StopMatcher
from sluice.internal.v1.frame_pb2 import Logprobs
from sluice.v1.inference_pb2 import Delta, TokenLogprob, TokenLogprobs
from sluice.wire.tokens import VisibleToken, put_tokens

TokenText = Callable[[int], str]
"""Text of one token alone."""
Token = tuple[VisibleToken, Logprobs | None]
"""Id and log-probabilities of one token."""
_HIDDEN: Final[Token] = (None, None)
_UNKNOWN: Final = TokenLogprobs()


class FilteredTokens:
    """The tokens of one answer that wait for the decision of its output filter."""

    def __init__(self, output: OutputFilter) -> None:
        self.output = output
        self._waiting: deque[tuple[Token, int, int]] = deque()
        """Tokens with the range of their text."""
        self._partial: list[Token] = []
        """Tokens of a character, or of another server's token, that is not complete."""
        self._partial_chars = 0
        self._end = 0

    def push(self, token: Token, text: str) -> str:
        """Adds ``token``, which completed ``text``; returns the text that may be shown."""
        self._partial.append(token)
        self._partial_chars += len(text)
        if text and not _goes_on(token):
            self._complete()
        return self.output.push(text) if text else ""

    def finish(self, text: str, *, truncated: bool) -> str:
        """Adds the last ``text``, which no token completed; returns the rest that may be shown."""
        return self.end(text) + self.output.finish(truncated)

    def end(self, text: str) -> str:
        """Adds the last ``text``; returns what of it may be shown already."""
        self._partial_chars += len(text)
        self._complete()
        shown = self.output.push(text)
        if self.output.windows is not None:
            self.output.windows.end()
        return shown

    def release(self, *, all_tokens: bool = False) -> list[Token]:
        """Takes out the tokens that may be shown: those that are decided, or all once the filter has finished."""
        limit = self._end if all_tokens else self.output.decided
        released, waiting = [], self._waiting
        while waiting and waiting[0][2] <= limit:
            token, start, end = waiting.popleft()
            released.append(_HIDDEN if self.output.hides(start, end) else token)
        return released

    def _complete(self) -> None:
        start, self._end = self._end, self._end + self._partial_chars
        for token in self._partial:
            self._waiting.append((token, start, self._end))
        self._partial.clear()
        self._partial_chars = 0


def _goes_on(token: Token) -> bool:
    """Whether the text of another server's token, which shows all of it at its end, goes on behind this one of ours."""
    logprobs = token[1]
    return logprobs is not None and logprobs.HasField("text") and not logprobs.text


class VisibleTokens:
    """The tokens that a caller may see, each with its text and log-probabilities.

    Attributes:
        token_ids: in order; None for those that are hidden.
        tail: text that no later token released: it was held back until the answer was complete.
        contradicted: the tokens differ from those that the caller was shown before.
    """

    def __init__(self, held: Sequence[VisibleToken] = ()) -> None:
        """``held``: the tokens that the caller was shown before."""
        self.token_ids: list[VisibleToken] = []
        self.tail = ""
        self.contradicted = False
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs | None] = []
        self._held = list(held)

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self._texts) + self.tail

    @property
    def lacks_held(self) -> bool:
        """Whether there are fewer tokens than the caller was shown before."""
        return len(self.token_ids) < len(self._held)

    def append(
        self, token_id: VisibleToken, text: str, logprobs: TokenLogprobs | None = None
    ) -> None:
        """Adds the next token."""
        if self._held:
            index = len(self.token_ids)
            self.contradicted |= index < len(self._held) and self._held[index] != token_id
        self.token_ids.append(token_id)
        self._texts.append(text)
        self._logprobs.append(logprobs)

    def delta(self, start: int, with_logprobs: bool, end: int | None = None) -> Delta | None:
        """What is visible from token ``start`` to ``end`` (None: to the last), in one piece; None when it is empty."""
        if start >= len(self.token_ids[:end]):
            return None
        delta = Delta(
            text="".join(self._texts[start:end]),
            index=start,
            logprobs=(
                [one or _UNKNOWN for one in self._logprobs[start:end]] if with_logprobs else ()
            ),
        )
        put_tokens(delta, self.token_ids[start:end], start)
        return delta

    def whole(self, with_logprobs: bool, end: int | None) -> tuple[Delta, list[int]]:
        """All that is visible up to token ``end`` (None: to the tail), and the length of each token's text."""
        delta = self.delta(0, with_logprobs, end) or Delta()
        delta.text += "" if end is not None else self.tail
        return delta, [len(text) for text in self._texts[:end]]

    def tail_delta(self) -> Delta | None:
        """The tail in a delta without tokens: a caller that reconnects at the end can tell it from known text."""
        return Delta(text=self.tail, index=len(self.token_ids)) if self.tail else None

    def text_before(self, index: int) -> str:
        """The text of the tokens before ``index``."""
        return "".join(self._texts[:index])

    def starts_with(self, token_ids: Sequence[VisibleToken]) -> bool:
        """Whether ``token_ids`` are the beginning of the answer, as far as a caller can know it."""
        known = self.token_ids + self._held[len(self.token_ids) :]
        return known[: len(token_ids)] == list(token_ids)


class Transcript:
    """Tokens of one model's answer, in order.

    Attributes:
        token_ids: all tokens as they arrived, stop tokens included; never for a caller.
        visible: what a caller sees of them.
        closed: no token will be added.
        blocked: the rules that ended the answer, if any did.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        stop_token_ids: Collection[int],
        token_text: TokenText,
        output: OutputFilter | None = None,
        held: Sequence[VisibleToken] = (),
        alternatives: int | None = None,
    ) -> None:
        """``held``: the tokens that the caller was shown before.

        ``alternatives``: how many per token a caller sees beside its log-probability; None: it sees neither.
        """
        self.token_ids: list[int] = []
        self.visible = VisibleTokens(held)
        self.closed = False
        self.blocked: tuple[str, ...] = ()
        self._ended = False
        self._pending_text = ""
        """Text that waits for a token to leave with."""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._stop_token_ids = stop_token_ids
        self._token_text = token_text
        self._filtered = None if output is None else FilteredTokens(output)
        self._alternatives = alternatives

    @property
    def text(self) -> str:
        """What is visible of the answer so far."""
        return self.visible.text

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._matcher.found

    def append(self, token_id: int, logprobs: Logprobs | None = None) -> None:
        """Adds the next token."""
        assert not self.closed, "a closed transcript takes no tokens"
        self.token_ids.append(token_id)
        text = "" if token_id in self._stop_token_ids else self._detokenizer.push(token_id)
        filtered = self._filtered
        if filtered is None:
            self._show(token_id, logprobs, self._matcher.push(text))
        else:
            self._pending_text += self._matcher.push(filtered.push((token_id, logprobs), text))
            self._show_all(filtered.release() if text else ())
        if self.stop is not None or (filtered is not None and filtered.output.stopped):
            self.close(truncated=True)

    def end(self) -> None:
        """No token will be added: token classifiers may read the rest of the answer before it is closed."""
        filtered = self._filtered
        if self._ended or self.closed or filtered is None or filtered.output.windows is None:
            return
        self._ended = True
        self._pending_text += self._matcher.push(filtered.end(self._detokenizer.flush()))

    def settle(self, window: Window, findings: Sequence[Finding]) -> None:
        """Token classifiers have read ``window`` of the answer."""
        filtered = self._filtered
        assert filtered is not None, "they read for the filter"
        shown = filtered.output.settle(window, findings)
        if self.closed:
            return
        self._pending_text += self._matcher.push(shown)
        self._show_all(filtered.release())
        if self.stop is not None or filtered.output.stopped:
            self.close(truncated=True)

    def close(self, truncated: bool = False) -> None:
        """Releases what was held back: the answer is complete.

        Args:
            truncated: the model did not end by itself; almost nothing is shown of a secret that was cut off.
        """
        if self.closed:
            return
        self.closed = True
        # In this order: the last characters may still complete a match or a stop string.
        text, filtered = "" if self._ended else self._detokenizer.flush(), self._filtered
        if filtered is not None:
            text = filtered.finish(text, truncated=truncated)
        self.visible.tail = self._matcher.push(text) + self._matcher.flush()
        if filtered is not None:
            self._show_all(filtered.release(all_tokens=True))
            self.blocked = () if self.stop is not None else filtered.output.stopped
        self.visible.contradicted |= self.stop is None and self.visible.lacks_held

    def _show_all(self, tokens: Sequence[Token]) -> None:
        """Shows ``tokens``, which leave together; the last brings the text."""
        if not tokens:
            return
        for token_id, logprobs in tokens[:-1]:
            self._show(token_id, logprobs, "")
        text, self._pending_text = self._pending_text, ""
        self._show(*tokens[-1], text)

    def _show(self, token_id: VisibleToken, logprobs: Logprobs | None, text: str) -> None:
        if token_id is None or logprobs is None or self._alternatives is None:
            self.visible.append(token_id, text)
        else:
            public = self._public(token_id, logprobs, self._alternatives)
            self.visible.append(token_id, text, public)

    def _public(self, token_id: int, logprobs: Logprobs, alternatives: int) -> TokenLogprobs:
        if logprobs.HasField("text"):
            named = zip(logprobs.top_texts, logprobs.top_logprobs, strict=False)
            top = [TokenLogprob(text=text, logprob=value) for text, value in named]
            return TokenLogprobs(
                logprob=logprobs.logprob, text=logprobs.text, top=top[:alternatives]
            )
        pairs = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=False)
        return TokenLogprobs(
            logprob=logprobs.logprob,
            text=self._token_text(token_id),
            top=[
                TokenLogprob(token_id=token_id, text=self._token_text(token_id), logprob=value)
                for token_id, value in islice(pairs, alternatives)
            ],
        )
