"""Log-probabilities of a chat, whose tokens are the server's, on the tokens in which its text travels.

The last of our tokens in one of the server's has its entry; the others have `NO_LOGPROBS`, whose probability is 1: so
sums are right, and what is left of the entries when those are dropped is what the server sent.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from model_workers.engine.protocol import TokenLogprobs
from model_workers.remote.api import TOKEN_CHARS_MAX, ServerToken
from sluice.wire.text_tokens import REASONING, REASONING_END

NO_LOGPROBS: Final = TokenLogprobs(0.0, text="")


def pieces_of(said: str, tokens: Sequence[ServerToken]) -> Iterator[tuple[str, TokenLogprobs]]:
    """``said`` by the ``tokens`` it was sent with.

    Tokens that are no whole characters are one piece, with the sum of their log-probabilities. So is all that was said
    when it is not the text of its tokens, as where the server made calls of tools out of it.
    """
    if said[0] in (REASONING, REASONING_END):
        yield said[0], NO_LOGPROBS
        said = said[1:]
    pieces = list(_whole_characters(said, tokens))
    if "".join(text for text, _ in pieces) == said:
        yield from pieces
    elif said:
        total = sum(one.logprob for one in tokens)
        has_entry = tokens and len(said) <= TOKEN_CHARS_MAX
        yield said, TokenLogprobs(total, text=said) if has_entry else NO_LOGPROBS


def _whole_characters(
    said: str, tokens: Sequence[ServerToken]
) -> Iterator[tuple[str, TokenLogprobs]]:
    """Up to the end of ``said``: what ends an answer is a token without text."""
    held, total, left = b"", 0.0, len(said)
    for one in tokens:
        alone, held, total = not held, held + one.data, total + one.logprob
        try:
            text = held.decode()
        except UnicodeDecodeError:
            continue
        if not text or left <= 0 or len(text) > TOKEN_CHARS_MAX:
            continue
        yield text, TokenLogprobs(total, text=text, top_texts=one.top if alone else ())
        held, total, left = b"", 0.0, left - len(text)
