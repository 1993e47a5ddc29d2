"""Log-probabilities as callers see them: of the tokens that the returned text is made of, and of nothing else.

1. The texts of the entries, joined, are the text of the answer. Tokens that make up a character together have it in the
   entry of the last of them; their `token_bytes`, joined, are its bytes.
2. A token of which a part stays, such as one that a stop string begins in, keeps its log-probability. Its text is that
   part.
3. A token that is not in the text has a blank entry: of a stop string, hidden, or replaced by the output filter.
4. The token that ends an answer has a log-probability and no text.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from gateway.models.tokenizer import ModelTokenizer, TokenText
from sluice.internal.v1.frame_pb2 import Logprobs
from sluice.v1.inference_pb2 import TokenLogprob, TokenLogprobs
from sluice.wire.tokens import VisibleToken

Token = tuple[VisibleToken, Logprobs | None]
"""Id and log-probabilities of one token."""
PieceOf = Callable[[int, bool], TokenText]
"""Returns text and bytes of one token by itself: at the beginning of a text (True) or after other text."""
_REPLACEMENT = "\ufffd"


@dataclass(slots=True)
class TokenGroup:
    """Tokens that make up whole characters together.

    Attributes:
        tokens: in order.
        text: of all of them.
        start: where it begins in the answer as the model gave it, in characters.
        end: where it ends.
    """

    tokens: list[Token]
    text: str
    start: int
    end: int


def aligned(groups: Sequence[TokenGroup], text: str) -> Iterator[tuple[TokenGroup, str, str]]:
    """Yield each group with its share of `text`, and what of the group's own text stands in it.

    `text` is what callers see of the groups: cut by a stop string, or with parts that the output filter replaced.
    """
    at = 0
    for number, group in enumerate(groups, 1):
        begin = at
        place = text.find(group.text, at)
        if place >= 0:
            visible_text, at = group.text, place + len(group.text)
        else:
            rest = text[at:]
            visible_text = rest if group.text.startswith(rest) else ""
            at += len(visible_text)
        yield group, text[begin : len(text) if number == len(groups) else at], visible_text


@dataclass(frozen=True)
class PublicLogprobs:
    """Makes the entries of one answer.

    Attributes:
        piece_of: What a token is.
        alternatives: How many a caller sees of each token.
        stop_token_ids: Tokens that end the answer.
    """

    piece_of: PieceOf
    alternatives: int
    stop_token_ids: Collection[int]

    def entries(self, group: TokenGroup, visible_text: str) -> list[TokenLogprobs | None]:
        """Return an entry for each token, of whose text `visible_text` is in the answer; None: a blank one."""
        pieces = self._pieces(group, visible_text)
        if group.text and not visible_text:
            pieces = [None] * len(pieces)
        is_first = group.start == 0
        return [
            None if piece is None else self._entry(token, piece, is_first)
            for token, piece in zip(group.tokens, pieces, strict=True)
        ]

    def _pieces(self, group: TokenGroup, visible_text: str) -> list[TokenText | None]:
        """Return what each token adds to the text; None: nothing that a caller sees."""
        token_ids = [token_id for token_id, _ in group.tokens]
        texts = [at for at, token_id in enumerate(token_ids) if token_id not in self.stop_token_ids]
        pieces: list[TokenText | None] = [TokenText("", b"") for _ in token_ids]
        if not texts:
            return pieces
        if visible_text != group.text:
            pieces = [None] * len(pieces)
        alone = [self.piece_of(token_ids[at] or 0, group.start == 0) for at in texts]
        joined = b"".join(piece.data for piece in alone)
        if visible_text == group.text == joined.decode(errors="replace"):
            for at, piece in zip(texts, alone, strict=True):
                pieces[at] = TokenText("", piece.data)
            pieces[texts[-1]] = TokenText(visible_text, alone[-1].data)
        else:
            pieces[texts[-1]] = TokenText(visible_text, visible_text.encode())
        return pieces

    def _entry(self, token: Token, piece: TokenText, is_first: bool) -> TokenLogprobs | None:
        token_id, logprobs = token
        if token_id is None or logprobs is None:
            return None
        made = TokenLogprobs(logprob=logprobs.logprob, text=piece.text, token_bytes=piece.data)
        if logprobs.HasField("text"):
            if not logprobs.text:  # the server's token goes on
                return None
            named = zip(logprobs.top_texts, logprobs.top_logprobs, strict=False)
            for text, value in islice(named, self.alternatives):
                made.top.add(text=text, logprob=value, token_bytes=_bytes_of(text))
            return made
        pairs = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=False)
        for other, value in islice(pairs, self.alternatives):
            top = piece if other == token_id else self.piece_of(other, is_first)
            made.top.append(
                TokenLogprob(token_id=other, text=top.text, logprob=value, token_bytes=top.data)
            )
        return made


def scored_entries(
    tokenizer: ModelTokenizer, token_ids: Sequence[int], logprobs: Sequence[Logprobs], most: int
) -> list[TokenLogprobs]:
    """Return an entry for each token of a whole text, with at most `most` alternatives."""
    detokenizer, public = tokenizer.detokenizer(), PublicLogprobs(tokenizer.token_text, most, ())
    groups, tokens, start = list[TokenGroup](), list[Token](), 0
    for token_id, logged in zip(token_ids, logprobs, strict=True):
        tokens.append((token_id, logged))
        if text := detokenizer.push(token_id):
            groups.append(TokenGroup(tokens, text, start, start + len(text)))
            tokens, start = [], start + len(text)
    if tokens:
        text = detokenizer.flush()
        groups.append(TokenGroup(tokens, text, start, start + len(text)))
    return [
        entry or TokenLogprobs() for group in groups for entry in public.entries(group, group.text)
    ]


def _bytes_of(text: str) -> bytes:
    """Return the bytes of a server's token; none where its text does not tell them."""
    return b"" if _REPLACEMENT in text else text.encode()
