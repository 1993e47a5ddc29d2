"""A prompt template: text with the names of columns in braces."""

import json
from collections.abc import Mapping
from string import Formatter
from typing import Any, Final

from sluice.errors import InvalidRequest
from sluice.openai.fields import BadField

PROMPT_CHARS_MAX: Final = 1 << 20
"""The size that a gateway takes of one request by default (`gateway.max_message_bytes`)."""
_HINT: Final = "a column stands as {name}, a brace itself as {{ or }}"


class Template:
    """Makes the prompt of a row: ``"Summarize: {text}"``.

    Only names stand in braces: no attributes, indexes, conversions or format specifications, so a template can reach
    nothing but the cells of its row.

    Raises:
        InvalidRequest: it is no such text.
    """

    def __init__(self, text: str) -> None:
        try:
            self._parts = list(Formatter().parse(text))
        except ValueError as error:
            raise InvalidRequest.of(
                "template", f"{text[:200]!r}: a brace has no partner; {_HINT}"
            ) from error
        for _, name, spec, conversion in self._parts:
            if name == "" or spec or conversion:
                raise InvalidRequest.of("template", f"{text!r}: {_HINT}")
        self.columns: Final = frozenset(name for _, name, _, _ in self._parts if name is not None)
        """The names of the columns that it needs."""

    def missing(self, columns: frozenset[str]) -> list[str]:
        """The columns that it needs and that are not among `columns`."""
        return sorted(self.columns - columns)

    def render(self, row: Mapping[str, Any]) -> str:
        """Return the prompt; the row has all `columns`. Values other than text stand in it as JSON.

        Raises:
            BadField: it would be longer than any gateway takes.
        """
        texts = {name: _text(row[name]) for name in self.columns}
        pieces = [
            one
            for literal, name, _, _ in self._parts
            for one in (literal, texts.get(name or "", ""))
        ]
        if sum(map(len, pieces)) > PROMPT_CHARS_MAX:
            raise BadField(
                f"prompt: the template makes over {PROMPT_CHARS_MAX} characters of this row"
            )
        return "".join(pieces)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
