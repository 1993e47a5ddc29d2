"""Read the prompts of /v1/completions: a text, token ids, or a list of either."""

from typing import Any, Final

from sluice.openai.fields import BadField

PROMPTS_MAX: Final = 128
"""Most prompts of one call, because each becomes a request."""
Prompt = str | list[int]


def prompts_of(prompt: Any) -> list[Prompt]:
    """Return the prompts in the field `prompt`.

    Raises:
        BadField: A prompt is invalid, or there are too many.
    """
    if _is_tokens(prompt):
        return [prompt]
    if not isinstance(prompt, list):
        return [prompt]  # not checked here: it is set as a text, which must be one
    if not prompt:
        raise BadField("prompt: is empty; send a text, token ids, or a list of these")
    if len(prompt) > PROMPTS_MAX and not isinstance(prompt[0], int):
        raise BadField(f"prompt: has {len(prompt)} entries; send at most {PROMPTS_MAX} in a call")
    for index, entry in enumerate(prompt):
        if not isinstance(entry, str) and not _is_tokens(entry):
            raise BadField(f"prompt[{index}]: must be a text or a list of token ids")
    return prompt


def _is_tokens(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(type(token_id) is int and 0 <= token_id < 1 << 32 for token_id in prompt)
    )
