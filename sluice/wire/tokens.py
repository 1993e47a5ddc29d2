"""Tokens of an answer as callers see them: None stands for a token of which the safety policy hides the text or a part.

On the wire a hidden token is 0 in `token_ids`, and its index in the answer stands in `hidden_indexes`.
"""

from collections.abc import Sequence

from sluice.v1.inference_pb2 import Delta, Resume

VisibleToken = int | None


def put_tokens(message: Delta | Resume, token_ids: Sequence[VisibleToken], start: int = 0) -> None:
    """Add `token_ids`, the first of which has index `start` in the answer."""
    message.token_ids.extend([token or 0 for token in token_ids])
    if None in token_ids:
        hidden = (start + at for at, token in enumerate(token_ids) if token is None)
        message.hidden_indexes.extend(hidden)


def tokens_of(message: Delta | Resume, start: int = 0) -> tuple[VisibleToken, ...]:
    """Return the tokens of `message`, the first of which has index `start` in the answer."""
    if not message.hidden_indexes:
        return tuple(message.token_ids)
    hidden = set(message.hidden_indexes)
    return tuple(
        None if start + at in hidden else token for at, token in enumerate(message.token_ids)
    )
