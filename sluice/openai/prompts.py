"""The prompts of /v1/completions: a text, the tokens of one, or a list of either."""

from typing import Any, Final

from sluice.openai.fields import BadField

PROMPTS_MAX: Final = 128
"""Prompts of one call: each is a request of its own."""
Prompt = str | list[int]


def prompts_of(given: Any) -> list[Prompt]:
    """Return the prompts that ``given`` is.

    Raises:
        BadField: it is none, or too many.
    """
    if _is_tokens(given):
        return [given]
    if not isinstance(given, list):
        return [given]  # whatever it is: a text, or refused as one
    if not given:
        raise BadField("prompt: is empty; send a text, token ids, or a list of these")
    if len(given) > PROMPTS_MAX and not isinstance(given[0], int):
        raise BadField(f"prompt: has {len(given)} entries; send at most {PROMPTS_MAX} in a call")
    for at, one in enumerate(given):
        if not isinstance(one, str) and not _is_tokens(one):
            raise BadField(f"prompt[{at}]: is neither a text nor a list of token ids")
    return given


def _is_tokens(given: Any) -> bool:
    return (
        isinstance(given, list)
        and bool(given)
        and all(type(one) is int and 0 <= one < 1 << 32 for one in given)
    )
