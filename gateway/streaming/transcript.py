"""The answer so far: every token, and what of it a caller sees.

Text is made token by token, so what is visible after N tokens depends on the answer alone, not on how it was cut into
frames. That is why a resumed call, a takeover and a replay can start behind any delta and neither lose nor repeat a
character.

An output filter delays tokens and text. A token is released when the filter has decided about every character of it;
the tokens that make up one character are released together. A token of which any character is hidden is shown as
None, so that indexes stay and ids never reveal what the text hides. Text leaves with a token (except a tail at the
end), so that an index of a token is a place in the text.

Where a caller wants log-probabilities (`gateway.streaming.token_logprobs`), a token is released with its text: it waits
for the rest of its character, and for a stop string that may begin in it.
"""

from collections import deque
from collections.abc import Collection, Sequence
from typing import Final

from gateway.models.tokenizer import Detokenizer
from gateway.safety.findings import Finding
from gateway.safety.output.filter import OutputFilter
from gateway.safety.output.windows import AnswerWindow
from gateway.streaming.token_logprobs import PieceOf, PublicLogprobs, Token, TokenGroup, aligned
from sluice.internal.v1.frame_pb2 import Logprobs
from sluice.v1.inference_pb2 import Delta, TokenLogprobs
from sluice.wire.tokens import VisibleToken, put_tokens

_HIDDEN: Final[Token] = (None, None)
_UNKNOWN: Final = TokenLogprobs()


class VisibleText:
    """Tokens as a caller may see them, each with its text.

    Attributes:
        visible_ids: None for those that are hidden.
        texts: of each token.
        logprobs: of each token; None: a blank entry.
        tail: text that no token released: it was held back until the answer was complete.
    """

    visible_ids: Sequence[VisibleToken]
    texts: Sequence[str]
    logprobs: Sequence[TokenLogprobs | None]
    tail = ""

    def delta(
        self, start: int, with_logprobs: bool, end: int | None = None, *, with_tail: bool = False
    ) -> Delta | None:
        """Return what is visible from token `start` to `end` (None: the last) in one piece; None when it is empty."""
        tail = self.tail if with_tail else ""
        if start >= len(self.visible_ids[:end]) and not tail:
            return None
        delta = Delta(
            text="".join(self.texts[start:end]) + tail,
            index=start,
            logprobs=(
                [entry or _UNKNOWN for entry in self.logprobs[start:end]] if with_logprobs else ()
            ),
        )
        put_tokens(delta, self.visible_ids[start:end], start)
        return delta

    def text_before(self, index: int) -> str:
        """Return the text of the tokens before `index`."""
        return "".join(self.texts[:index])


class Transcript(VisibleText):
    """The text of one model's answer: its tokens in order, and what of them a caller may see.

    Attributes:
        token_ids: as the model gave them.
        closed: no token will be added.
        blocked: the rules that ended the answer, if any did.
        output: the output filter, if the policy has one.
        contradicted: the tokens differ from those that the caller was shown before.
    """

    closed = False
    blocked: tuple[str, ...] = ()
    contradicted = False
    _ended = False
    _partial_text = ""
    _chars = 0
    """Where the text of the last token that waited ends."""
    _pending_text = ""
    """Text that waits for a token to leave with."""
    _pushed = 0
    """Characters that the stop strings were searched in."""
    _allotted = 0
    """Characters that have left with tokens, where a caller wants log-probabilities."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        stop_token_ids: Collection[int],
        piece_of: PieceOf,
        output: OutputFilter | None = None,
        held_ids: Sequence[VisibleToken] = (),
        alternatives: int | None = None,
    ) -> None:
        """Begin an answer.

        Args:
            detokenizer: makes its text.
            stops: strings that end it.
            stop_token_ids: tokens that end it.
            piece_of: what a token is.
            output: filters it.
            held_ids: the tokens that the caller was shown before.
            alternatives: how many per token a caller sees beside its log-probability; None: it sees neither.
        """
        self.token_ids: list[int] = []
        self.visible_ids: list[VisibleToken] = []
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self._held_ids = list(held_ids)
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._stop_token_ids = stop_token_ids
        self._public: PublicLogprobs | None = None
        if alternatives is not None:
            self._public = PublicLogprobs(piece_of, alternatives, stop_token_ids)
        self.output = output
        self._undecided: deque[TokenGroup] = deque()
        """Tokens that wait for the output filter."""
        self._waiting: deque[tuple[TokenGroup, int]] = deque()
        """Tokens that wait for the stop strings, each with the characters that these must have let pass."""
        self._partial: list[Token] = []
        """Tokens of a character, or of another server's token, that is not complete."""

    @property
    def text(self) -> str:
        """What is visible of the answer so far."""
        return "".join(self.texts) + self.tail

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._matcher.matched

    def append(self, token_id: int, logprobs: Logprobs | None = None) -> None:
        """Add the next token."""
        assert not self.closed, "a closed transcript takes no tokens"
        self.token_ids.append(token_id)
        text = "" if token_id in self._stop_token_ids else self._detokenizer.push(token_id)
        if self.output is None and self._public is None:
            self._show(token_id, None, self._matcher.push(text))
        else:
            self._partial.append((token_id, logprobs))
            if text:
                self._partial_text += text
                # Another server's token shows all of its text at its end: this one of ours may be a part of it.
                is_part = logprobs is not None and logprobs.HasField("text") and not logprobs.text
                if not is_part:
                    self._complete()
                self._release(text if self.output is None else self.output.push(text))
        self._close_if_stopped()

    def end(self) -> None:
        """End the tokens: token classifiers may read the rest of the answer before it is closed."""
        output = self.output
        if self._ended or self.closed or output is None or output.windows is None:
            return
        self._ended = True
        self._search(self._filter_last(self._detokenizer.flush()))

    def settle(self, window: AnswerWindow, findings: Sequence[Finding]) -> bool:
        """Apply what token classifiers found in `window` of the answer; return whether that ends it."""
        assert self.output is not None, "they read for the filter"
        text = self.output.settle(window, findings)
        if self.closed:
            return False
        self._release(text)
        return self._close_if_stopped()

    def close(self, truncated: bool = False) -> None:
        """Release what was held back: the answer is complete.

        Args:
            truncated: the model did not end by itself; almost nothing is shown of a secret that was cut off.
        """
        if self.closed:
            return
        self.closed = True
        # In this order: the last characters may still complete a match or a stop string.
        text, output = "" if self._ended else self._detokenizer.flush(), self.output
        if output is not None:
            text = self._filter_last(text) + output.finish(truncated)
        elif self._public is not None:
            self._partial_text += text
            self._complete()
        if self._public is not None:
            self._search(text)
            self._pending_text += self._matcher.flush()
            self._show_decided(self._chars)
            self._show_waiting(everything=True)
            self.tail, self._pending_text = self._pending_text, ""
        else:
            self.tail = self._matcher.push(text) + self._matcher.flush()
            self._show_decided(self._chars)
        if output is not None:
            self.blocked = () if self.stop is not None else output.stopped
        self.contradicted |= self.stop is None and len(self.visible_ids) < len(self._held_ids)

    def whole(self, with_logprobs: bool, end: int | None) -> tuple[Delta, list[int]]:
        """Return all that is visible up to token `end` (None: the tail), and the length of each token's text."""
        delta = self.delta(0, with_logprobs, end, with_tail=end is None)
        return delta or Delta(), [len(text) for text in self.texts[:end]]

    def starts_with(self, token_ids: Sequence[VisibleToken]) -> bool:
        """Return whether `token_ids` are the beginning of the answer, as far as a caller can know it."""
        visible = self.visible_ids + self._held_ids[len(self.visible_ids) :]
        return visible[: len(token_ids)] == list(token_ids)

    def _close_if_stopped(self) -> bool:
        """Close the answer if a stop string or the filter has ended it; return whether one has."""
        if self._matcher.matched is None and (self.output is None or not self.output.stopped):
            return False
        self.close(truncated=True)
        return True

    def _complete(self) -> None:
        """Let the tokens so far, which are whole characters, wait for the filter together."""
        start, text = self._chars, self._partial_text
        self._chars += len(text)
        if self._partial:
            self._undecided.append(TokenGroup(self._partial, text, start, self._chars))
        self._partial, self._partial_text = [], ""

    def _filter_last(self, text: str) -> str:
        """Give the filter the last `text`, which no token completed; return what of it may be shown already."""
        assert self.output is not None, "without a filter nothing waits for it"
        self._partial_text += text
        self._complete()
        visible_text = self.output.push(text)
        if self.output.windows is not None:
            self.output.windows.end()
        return visible_text

    def _release(self, text: str) -> None:
        """Release `text`, which passed the filter, and the tokens that the filter has decided about."""
        self._search(text)
        self._show_decided(self._chars if self.output is None else self.output.decided)
        self._show_waiting()

    def _search(self, text: str) -> None:
        """Search `text` for stop strings; the rest waits for a token to leave with."""
        self._pushed += len(text)
        self._pending_text += self._matcher.push(text)

    def _show_decided(self, limit: int) -> None:
        """Show the tokens whose text ends by `limit`, the last with the text; with log-probabilities they wait."""
        undecided, output, groups = self._undecided, self.output, list[TokenGroup]()
        while undecided and undecided[0].end <= limit:
            group = undecided.popleft()
            if output is not None and output.hides(group.start, group.end):
                group.tokens, group.text = [_HIDDEN] * len(group.tokens), ""
            groups.append(group)
        if not groups:
            return
        if self._public is not None:
            let_pass = self._pushed - self._begun(groups[-1].end, limit)
            self._waiting += [(group, let_pass) for group in groups]
            return
        for group in groups:
            for token_id, _ in group.tokens:
                self._show(token_id, None, "")
        self.texts[-1], self._pending_text = self._pending_text, ""

    def _begun(self, end: int, limit: int) -> int:
        """Return how much of the text that passed the filter is of the token that begins at `end`."""
        if end == limit or self.output is None or self.output.hides(end, limit):
            return 0
        return limit - end

    def _show_waiting(self, *, everything: bool = False) -> None:
        """Show the tokens whose text the stop strings have let pass, each with its share of it."""
        waiting, public = self._waiting, self._public
        while waiting and (everything or waiting[0][1] <= self._allotted + len(self._pending_text)):
            assert public is not None, "without log-probabilities no token waits"
            limit, groups = waiting[0][1], list[TokenGroup]()
            while waiting and waiting[0][1] == limit:
                groups.append(waiting.popleft()[0])
            text = self._pending_text[: max(0, limit - self._allotted)]
            self._pending_text = self._pending_text[len(text) :]
            self._allotted += len(text)
            for group, share, visible_text in aligned(groups, text):
                entries = public.entries(group, visible_text)
                for (token_id, _), entry in zip(group.tokens, entries, strict=True):
                    self._show(token_id, entry, "")
                self.texts[-1] = share

    def _show(self, token_id: VisibleToken, logprobs: TokenLogprobs | None, text: str) -> None:
        index = len(self.visible_ids)
        if index < len(self._held_ids) and self._held_ids[index] != token_id:
            self.contradicted = True
        self.visible_ids.append(token_id)
        self.texts.append(text)
        self.logprobs.append(logprobs)


class StopMatcher:
    """Releases text that arrives in pieces up to the first stop string, and holds back only what may become one.

    The stop string whose last character comes first ends the answer; of two that end together the longer one. That
    depends on the text alone, never on how it was cut into pieces.

    Attributes:
        matched: the stop string that ended the text, once there is one; nothing is released after it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._pending_text = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return what may be shown after `text` came."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        text = self._pending_text + text
        match = self._first_match(text)
        if match is not None:
            start, self.matched = match
            self._pending_text = ""
            return text[:start]
        keep = self._possible_start(text)
        self._pending_text = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what was held back, when no more text comes."""
        text, self._pending_text = self._pending_text, ""
        return text

    def _first_match(self, text: str) -> tuple[int, str] | None:
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        return min(matches)[1:] if matches else None

    def _possible_start(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
