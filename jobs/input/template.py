"""Prompt templates: text with the names of columns in braces."""

import json
from collections.abc import Mapping
from string import Formatter
from typing import Any, Final

from sluice.errors import InvalidRequest
from sluice.openai.fields import BadField

PROMPT_CHARS_MAX: Final = 1 << 20
"""Most characters of a prompt: a character is at least one byte, and no gateway with the default
`gateway.max_message_bytes` takes more.
"""
_HINT: Final = "write a column as {name}, and a literal brace as {{ or }}"


class Template:
    """Makes the prompt of a row: `"Summarize: {text}"`.

    What stands in braces is looked up whole as the name of a column, `a.b` too; it is never
    evaluated. Conversions and format specifications are refused, so a prompt has only what is in the
    cells of its row.

    Raises:
        InvalidRequest: the text is no template.
    """

    def __init__(self, text: str) -> None:
        try:
            self._parts = list(Formatter().parse(text))
        except ValueError as error:
            raise InvalidRequest.of(
                "template", f"{text[:200]!r}: unbalanced brace; {_HINT}"
            ) from error
        # A format specification could make a prompt of any length.
        for _, name, spec, conversion in self._parts:
            if name == "" or spec or conversion:
                raise InvalidRequest.of("template", f"{text!r}: {_HINT}")
        self.columns: Final = frozenset(name for _, name, _, _ in self._parts if name is not None)
        """Names of the columns that it needs."""

    def render(self, row: Mapping[str, Any]) -> str:
        """Return the prompt of a row. Values other than text are rendered as JSON.

        Raises:
            BadField: a column has no value, or the prompt is longer than any gateway accepts.
        """
        for column in self.columns:
            if row.get(column) is None:
                raise BadField(f"{column}: missing or null, but the template needs it")
        texts = {name: _text(row[name]) for name in self.columns}
        pieces = [
            piece
            for literal, name, _, _ in self._parts
            for piece in (literal, texts.get(name or "", ""))
        ]
        if sum(map(len, pieces)) > PROMPT_CHARS_MAX:
            raise BadField(
                f"prompt: the template makes over {PROMPT_CHARS_MAX} characters of this row"
            )
        return "".join(pieces)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
